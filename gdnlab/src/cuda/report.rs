//! What the compiler says about a kernel: registers, spills, shared memory, and the size of its parameter.

use super::cubin;

/// What the compiler says about one CUBIN.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Each kernel (`extern "C" __global__`) in it.
    pub functions: Vec<FunctionReport>,
    /// Each line that warns: of the front end, of ptxas, and ptxas's notes that it serialises wgmma.
    pub warnings: Vec<String>,
}

/// What the compiler says about one kernel, with the functions that it calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FunctionReport {
    /// Its name.
    pub name: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread's largest stack frame, in local memory.
    pub stack_bytes: u32,
    /// Bytes that a thread stores to local memory for want of registers.
    pub spill_store_bytes: u32,
    /// Bytes that a thread loads from there.
    pub spill_load_bytes: u32,
    /// Bytes of shared memory that a block has without asking.
    pub shared_bytes: u32,
    /// Size of the parameter in bytes.
    pub parameter_bytes: u32,
    /// Threads of a block at the most, where `__launch_bounds__` says so.
    pub max_threads: Option<u32>,
}

impl Report {
    /// Reads the log of a compilation with `--ptxas-options=-v`, and from the CUBIN what the log does not say.
    pub(super) fn read(log: &str, image: &[u8]) -> Self {
        let mut report = Self::of_log(log);
        for function in &mut report.functions {
            let facts = cubin::facts(image, &function.name);
            function.parameter_bytes = facts.parameter_bytes;
            function.max_threads = facts.max_threads;
        }
        report
    }

    /// The kernel `name`, if it is in here.
    pub fn function(&self, name: &str) -> Option<&FunctionReport> {
        self.functions.iter().find(|function| function.name == name)
    }

    fn of_log(log: &str) -> Self {
        let mut report = Self::default();
        for line in log.lines() {
            if is_warning(line) {
                report.warnings.push(line.trim().to_owned());
            } else if let Some((_, rest)) = line.split_once("Compiling entry function '") {
                let name = rest.split('\'').next().unwrap_or_default().to_owned();
                report.functions.push(FunctionReport { name, ..FunctionReport::default() });
            } else if let Some(function) = report.functions.last_mut() {
                function.read_line(line);
            }
        }
        report.functions.sort_by(|a, b| a.name.cmp(&b.name));
        report
    }
}

/// ptxas calls it a note, not a warning, when it gives up overlapping the matrix instructions of Hopper.
fn is_warning(line: &str) -> bool {
    line.contains("warning") || line.contains("Potential Performance Loss") || line.contains("(C75")
}

impl FunctionReport {
    fn read_line(&mut self, line: &str) {
        let text = line.split_once(':').map_or(line, |(_, rest)| rest);
        if text.contains("bytes stack frame") {
            // One such line for the kernel, then one for each function that was not inlined into it.
            self.stack_bytes = self.stack_bytes.max(number_before(text, "bytes stack frame"));
            self.spill_store_bytes += number_before(text, "bytes spill stores");
            self.spill_load_bytes += number_before(text, "bytes spill loads");
        } else if text.contains("registers") {
            self.registers = number_before(text, "registers");
            self.shared_bytes = number_before(text, "bytes smem");
        }
    }
}

/// The number in front of `words`; 0 where `words` do not occur.
fn number_before(text: &str, words: &str) -> u32 {
    let before = text.split_once(words).and_then(|(before, _)| before.split_whitespace().next_back());
    before.and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
