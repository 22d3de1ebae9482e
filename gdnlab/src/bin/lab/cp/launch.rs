//! Ranks as processes: started, watched, and stopped together.

use super::WAITED_IN_VAIN;
use super::alive::{MARK, WATCHED};
use crate::output::{note, print};
use gdnlab::{Error, Result};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Between two looks at who has ended.
const PAUSE: Duration = Duration::from_millis(20);
/// How long others may take to end after one has failed, so that the first one is told from those that waited for it.
const GRACE: Duration = Duration::from_millis(500);

/// Ranks to be started.
pub struct Ranks {
    pub count: usize,
    /// Whether each has a GPU of its own.
    pub gpu_each: bool,
    /// After this time without a sign of progress a rank is given up.
    pub timeout: Duration,
}

/// A line of a rank.
enum Line {
    /// It lives, and says what it begins unless the words are empty.
    Status(String),
    /// For the person.
    Output(String),
    /// For the person, beside the output.
    Note(String),
}

impl Line {
    /// Whether it shows progress, and not life alone.
    fn begins_something(&self) -> bool {
        !matches!(self, Self::Status(words) if words.is_empty())
    }
}

/// One that was started.
struct Started {
    child: Child,
    ended: Option<ExitStatus>,
    does: String,
    seen: Instant,
}

impl Started {
    /// Takes in a line of this rank, or passes it on.
    fn hear(&mut self, rank: usize, line: Line) -> Result<()> {
        match line {
            Line::Status(words) if words.is_empty() => {}
            Line::Status(words) => self.does = words,
            Line::Output(text) => print(&(text + "\n"))?,
            Line::Note(text) => note(format_args!("rank {rank}: {text}")),
        }
        Ok(())
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if self.ended.is_none() {
            // It may have ended by itself just now.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Ranks {
    /// Starts this program once for each rank, with the same arguments, and waits for all of them. Gives the exit code: that
    /// of rank 0, or 1 where a rank has failed or hangs, which is then named and all others are stopped.
    ///
    /// # Errors
    /// [`Error::Io`] where a process cannot be started, [`Error::Input`] where no port is free.
    pub fn run(&self) -> Result<u8> {
        let (sender, lines) = channel();
        let port = free_port()?;
        let mut ranks = Vec::with_capacity(self.count);
        for rank in 0..self.count {
            ranks.push(self.start(rank, port, &sender)?);
        }
        drop(sender);
        self.watch(&mut ranks, &lines)
    }

    fn start(&self, rank: usize, port: u16, lines: &Sender<(usize, Line)>) -> Result<Started> {
        let program = std::env::current_exe().map_err(|error| Error::io("this program", error))?;
        let mut command = Command::new(&program);
        command.args(without_ranks(std::env::args_os().skip(1)));
        let (rank_text, count) = (rank.to_string(), self.count.to_string());
        command.envs([("RANK", &rank_text), ("LOCAL_RANK", &rank_text), ("WORLD_SIZE", &count)]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port.to_string()), (WATCHED, "1")]);
        if self.gpu_each {
            command.env("GDNLAB_GPU", &rank_text);
        }
        if std::env::var_os("RAYON_NUM_THREADS").is_none() {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            command.env("RAYON_NUM_THREADS", (cores / self.count).max(1).to_string());
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| Error::io(&program, error))?;
        note(format_args!("rank {rank} is process {}", child.id()));
        let status = |line: String| match line.strip_prefix(MARK) {
            Some(words) => Line::Status(words.to_owned()),
            None => Line::Output(line),
        };
        read_lines(child.stdout.take(), rank, lines, status);
        read_lines(child.stderr.take(), rank, lines, Line::Note);
        Ok(Started { child, ended: None, does: "starts".to_owned(), seen: Instant::now() })
    }

    fn watch(&self, ranks: &mut [Started], lines: &Receiver<(usize, Line)>) -> Result<u8> {
        let (mut progress, mut looked, mut open) = (Instant::now(), Instant::now(), true);
        loop {
            match lines.recv_timeout(PAUSE) {
                Ok((rank, line)) => {
                    ranks[rank].seen = Instant::now();
                    if line.begins_something() {
                        progress = Instant::now();
                    }
                    ranks[rank].hear(rank, line)?;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    open = false;
                    std::thread::sleep(PAUSE);
                }
            }
            if looked.elapsed() < PAUSE {
                continue;
            }
            looked = Instant::now();
            look_who_ended(ranks)?;
            if ranks.iter().any(has_failed) {
                return self.report_failed(ranks, lines);
            }
            if ranks.iter().all(|rank| rank.ended.is_some()) && !open {
                return Ok(ranks.first().and_then(|rank| rank.ended?.code()).map_or(1, |code| code as u8));
            }
            if let Some(hanging) = self.hanging(ranks, progress) {
                return Ok(report_hanging(ranks, &hanging, self.timeout));
            }
        }
    }

    /// Ranks that show no sign of life; or else, where nobody begins anything any more, those that wait for no other.
    fn hanging(&self, ranks: &[Started], progress: Instant) -> Option<Vec<usize>> {
        let running = || ranks.iter().enumerate().filter(|(_, rank)| rank.ended.is_none());
        let named = |found: Vec<usize>| (!found.is_empty()).then_some(found);
        let silent = running().filter(|(_, rank)| rank.seen.elapsed() > self.timeout);
        if let Some(silent) = named(silent.map(|(rank, _)| rank).collect()) {
            return Some(silent);
        }
        if progress.elapsed() <= self.timeout {
            return None;
        }
        let busy = running().filter(|(_, rank)| !rank.does.starts_with("waits"));
        named(busy.map(|(rank, _)| rank).collect()).or_else(|| named(running().map(|(rank, _)| rank).collect()))
    }

    /// Names the rank that failed first.
    fn report_failed(&self, ranks: &mut [Started], lines: &Receiver<(usize, Line)>) -> Result<u8> {
        let until = Instant::now() + GRACE;
        while Instant::now() < until && ranks.iter().any(|rank| rank.ended.is_none()) {
            std::thread::sleep(PAUSE);
            look_who_ended(ranks)?;
        }
        // What they said last.
        while let Ok((rank, line)) = lines.try_recv() {
            ranks[rank].hear(rank, line)?;
        }
        let in_vain = |rank: &Started| rank.ended.and_then(|status| status.code()) == Some(WAITED_IN_VAIN.into());
        let mut culprits: Vec<usize> =
            (0..ranks.len()).filter(|&rank| has_failed(&ranks[rank]) && !in_vain(&ranks[rank])).collect();
        if culprits.is_empty() {
            culprits = (0..ranks.len()).filter(|&rank| has_failed(&ranks[rank])).collect();
        }
        let stopped = ranks.iter().filter(|rank| rank.ended.is_none()).count();
        for rank in culprits {
            let how = ranks[rank].ended.map(in_words).unwrap_or_default();
            note(format_args!("rank {rank} {how} while it {}; {stopped} others were stopped", ranks[rank].does));
        }
        Ok(1)
    }
}

fn report_hanging(ranks: &[Started], hanging: &[usize], timeout: Duration) -> u8 {
    let stopped = ranks.iter().filter(|rank| rank.ended.is_none()).count() - hanging.len();
    for &rank in hanging {
        note(format_args!(
            "rank {rank} hangs: no progress for {} s since it {}; it and {stopped} others were stopped",
            timeout.as_secs(),
            ranks[rank].does
        ));
    }
    1
}

fn look_who_ended(ranks: &mut [Started]) -> Result<()> {
    for rank in ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
        rank.ended = rank.child.try_wait().map_err(|error| Error::io("a rank's process", error))?;
    }
    Ok(())
}

/// Whether it ended as none should: rank 0 says by 1 that something does not hold, which is a result.
fn has_failed(rank: &Started) -> bool {
    rank.ended.is_some_and(|status| !matches!(status.code(), Some(0 | 1)))
}

fn in_words(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was ended by signal {signal}"),
        (None, Some(code)) => format!("ended with exit code {code}"),
        _ => "ended".to_owned(),
    }
}

fn read_lines(
    from: Option<impl Read + Send + 'static>,
    rank: usize,
    lines: &Sender<(usize, Line)>,
    kind: impl Fn(String) -> Line + Send + 'static,
) {
    let (Some(from), lines) = (from, lines.clone()) else { return };
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(std::io::Result::ok) {
            if lines.send((rank, kind(line))).is_err() {
                break;
            }
        }
    });
}

/// The arguments but for the number of ranks, which the variables of each say.
fn without_ranks(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut is_number = false;
    let kept = arguments.filter(|argument| {
        let drop = std::mem::take(&mut is_number) || argument == "--ranks";
        is_number = drop && argument == "--ranks";
        !drop && !argument.to_string_lossy().starts_with("--ranks=")
    });
    kept.collect()
}

/// A port where nobody listens now.
fn free_port() -> Result<u16> {
    let bound = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    bound.map(|address| address.port()).map_err(|error| Error::input(format!("no free port on this machine: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_get_all_arguments_but_their_number() {
        let arguments = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let given = arguments("cp --ranks 4 --heads 2 --ranks=4 --scaling strong");
        assert_eq!(without_ranks(given.into_iter()), arguments("cp --heads 2 --scaling strong"));
    }
}
