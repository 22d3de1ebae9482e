//! What a rank tells the program that started it: that it lives, and what it does.

use std::io::Write;
use std::sync::Mutex;
use std::time::Duration;

/// The variable that says that a launcher of ours listens.
pub const WATCHED: &str = "GDNLAB_CP_WATCHED";
/// What a line for the launcher begins with; other lines are for the person.
pub const MARK: char = '\u{1}';
/// Between two signs of life.
const BEAT: Duration = Duration::from_millis(250);

/// A rank's line to its launcher, where there is one.
pub struct Alive {
    watched: bool,
}

/// Lines are written whole.
static LINE: Mutex<()> = Mutex::new(());

impl Alive {
    /// Shows from now on that it lives, if a launcher of ours listens. A rank whose launcher is gone ends.
    pub fn of_launcher() -> Self {
        let watched = std::env::var_os(WATCHED).is_some();
        if watched {
            std::thread::spawn(|| {
                while write("").is_ok() {
                    std::thread::sleep(BEAT);
                }
                std::process::exit(1);
            });
        }
        Self { watched }
    }

    /// Whether somebody listens.
    pub fn is_watched(&self) -> bool {
        self.watched
    }

    /// Says what begins.
    pub fn say(&self, words: &str) {
        // Whether anybody reads it shows at the next sign of life.
        let _ = write(words);
    }
}

fn write(words: &str) -> std::io::Result<()> {
    let _line = LINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{MARK}{words}").and_then(|()| stdout.flush())
}
