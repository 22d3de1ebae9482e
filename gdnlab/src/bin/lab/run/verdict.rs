//! Whether a cell did what it should.
//!
//! The kernel reports success after a panic and after a failed `?`, so success is read from what a cell leaves behind.
//! A cell fails if
//! - it did not compile, its process died, or it ran past its time limit;
//! - a panic message stands on standard error;
//! - its value is an `Err`;
//! - it ends in a statement, and that end was not reached ([`with_end_mark`]);
//! - it ends in a block, uses `?`, and wrote to standard error, where a failed `?` leaves its message;
//! - it ends in an expression, or has an output in the file as it was before the run, and showed nothing now.
//!   What goes to standard error does not count as showing something, nor does the value `()`.
//!
//! A cell with the tag `raises-exception` may do all of this.

use super::notebook::text_of;
use serde_json::Value;

/// Printed by a statement that is added to a cell, so that an early end can be told from a full one.
const END_MARK: &str = "gdnlab: the cell ran to its end";

/// How the code of a cell ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// A statement, closed by a semicolon.
    Statement,
    /// A block: an item, a loop, or a value; its text alone does not tell.
    Block,
    /// A value that the kernel shows.
    Expression,
    /// A command of the kernel (`:dep ...`), or nothing but comments.
    Other,
}

/// How `source` ends.
pub fn ending(source: &str) -> Ending {
    let last = source.lines().map(without_comment).rfind(|line| !line.is_empty());
    match last {
        None => Ending::Other,
        Some(line) if line.starts_with([':', '!']) => Ending::Other,
        Some(line) if line.ends_with(';') => Ending::Statement,
        Some(line) if line.ends_with('}') => Ending::Block,
        Some(_) => Ending::Expression,
    }
}

/// `source` as it is sent to the kernel.
pub fn with_end_mark(source: &str) -> String {
    match ending(source) {
        Ending::Statement => format!("{source}\nprintln!(\"{END_MARK}\");"),
        _ => source.to_owned(),
    }
}

/// Takes the end mark out of `outputs`; whether it was there.
pub fn take_end_mark(outputs: &mut Vec<Value>) -> bool {
    let mark = format!("{END_MARK}\n");
    let mut found = false;
    for output in outputs.iter_mut() {
        if output["name"] == "stdout"
            && let Some(text) = text_of(&output["text"])
            && text.contains(&mark)
        {
            output["text"] = Value::String(text.replace(&mark, ""));
            found = true;
        }
    }
    outputs.retain(|output| {
        !(output["output_type"] == "stream" && text_of(&output["text"]).is_some_and(|t| t.is_empty()))
    });
    found
}

/// What a cell left behind.
pub struct Outcome<'a> {
    pub source: &'a str,
    /// Outputs without the end mark.
    pub outputs: &'a [Value],
    pub reached_end: bool,
    /// Whether the file had outputs for this cell before the run.
    pub showed_before: bool,
}

/// What is wrong with a cell, in words, or nothing.
pub fn fault(outcome: &Outcome) -> Option<String> {
    let errors: Vec<String> = outcome.outputs.iter().filter_map(error_text).collect();
    if !errors.is_empty() {
        return Some(errors.join("\n"));
    }
    let stderr = stream(outcome.outputs, "stderr");
    if let Some(panic) = panic_message(&stderr) {
        return Some(panic);
    }
    if let Some(value) = outcome.outputs.iter().find_map(plain_value).filter(|value| value.starts_with("Err(")) {
        return Some(format!("returned {value}"));
    }
    if ending(outcome.source) == Ending::Statement && !outcome.reached_end {
        return Some(early_return(&stderr));
    }
    if ending(outcome.source) == Ending::Block && outcome.source.contains('?') && !stderr.is_empty() {
        return Some(early_return(&stderr));
    }
    if shows_something(outcome.outputs) {
        return None;
    }
    let expected = match ending(outcome.source) {
        Ending::Expression => "it ends in an expression: close it with `;` if it has nothing to show",
        _ if outcome.showed_before => "it did before: clear its output in the file if that is meant",
        _ => return None,
    };
    if stderr.is_empty() { Some(format!("showed nothing, but {expected}")) } else { Some(early_return(&stderr)) }
}

fn early_return(stderr: &str) -> String {
    let reason = if stderr.is_empty() { "(no message)" } else { stderr.trim_end() };
    format!("stopped before its end: {reason}")
}

/// Whether any of `outputs` is more than messages on standard error and the value `()`.
pub fn shows_something(outputs: &[Value]) -> bool {
    outputs.iter().any(|output| output["name"] != "stderr" && plain_value(output).as_deref() != Some("()"))
}

fn error_text(output: &Value) -> Option<String> {
    if output["output_type"] != "error" {
        return None;
    }
    let traceback = output["traceback"].as_array();
    let lines: Vec<&str> = traceback.map_or_else(Vec::new, |lines| lines.iter().filter_map(Value::as_str).collect());
    let text = without_colours(&lines.join("\n"));
    Some(if text.trim().is_empty() { output["evalue"].as_str().unwrap_or("error").to_owned() } else { text })
}

/// The message of the first panic on standard error: its line and the next, where Rust puts the text.
fn panic_message(stderr: &str) -> Option<String> {
    let mut lines = stderr.lines();
    let head = lines.find(|line| line.starts_with("thread '") && line.contains(" panicked at "))?;
    Some(format!("{head}\n{}", lines.next().unwrap_or_default()))
}

fn stream(outputs: &[Value], name: &str) -> String {
    outputs.iter().filter(|output| output["name"] == name).filter_map(|output| text_of(&output["text"])).collect()
}

fn plain_value(output: &Value) -> Option<String> {
    if output["output_type"] != "execute_result" {
        return None;
    }
    text_of(&output["data"]["text/plain"])
}

/// A line of code without its comment. A `//` inside a string is one if an odd number of quotes stands before it.
fn without_comment(line: &str) -> &str {
    let comment = line.match_indices("//").find(|(at, _)| line[..*at].matches('"').count().is_multiple_of(2));
    comment.map_or(line, |(at, _)| &line[..at]).trim()
}

fn without_colours(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("\u{1b}[") {
        plain.push_str(&rest[..at]);
        rest = rest[at..].split_once('m').map_or("", |(_, after)| after);
    }
    plain + rest
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
