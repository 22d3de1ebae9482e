//! What is known about a compiled kernel: registers, spills, shared memory, and the size of its parameter.
//!
//! All that a launch needs stands in the CUBIN. Only warnings and spills come from the compiler's log: a CUBIN that was
//! not compiled but found in a cache of the compiler comes without them.

use super::cubin;

/// What is known about one CUBIN.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Each kernel (`extern "C" __global__`) in it.
    pub functions: Vec<FunctionReport>,
    /// Each line that warns: of the front end, of ptxas, and ptxas's notes that it serialises wgmma.
    pub warnings: Vec<String>,
}

/// What is known about one kernel, with the functions that it calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FunctionReport {
    /// Its name.
    pub name: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread's stack, in local memory.
    pub stack_bytes: u32,
    /// What registers did not suffice for, where the compiler told.
    pub spills: Option<Spills>,
    /// Bytes of shared memory that a block has without asking.
    pub shared_bytes: u32,
    /// Size of the parameter in bytes.
    pub parameter_bytes: u32,
    /// Threads of a block at the most, where `__launch_bounds__` says so.
    pub max_threads: Option<u32>,
}

/// Bytes that a thread moves between registers and local memory for want of registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spills {
    /// Bytes that it stores.
    pub store_bytes: u32,
    /// Bytes that it loads.
    pub load_bytes: u32,
}

impl Report {
    /// Reads the CUBIN, and warnings and spills from the log of a compilation with `--ptxas-options=-v`.
    pub(super) fn read(log: &str, image: &[u8]) -> Self {
        let mut functions = cubin::kernels(image);
        for function in &mut functions {
            function.spills = spills(log, &function.name);
        }
        let warnings = log.lines().filter(|line| is_warning(line)).map(|line| line.trim().to_owned()).collect();
        Self { functions, warnings }
    }

    /// The kernel `name`, if it is in here.
    pub fn function(&self, name: &str) -> Option<&FunctionReport> {
        self.functions.iter().find(|function| function.name == name)
    }
}

/// ptxas calls it a note, not a warning, when it gives up overlapping the matrix instructions of Hopper.
fn is_warning(line: &str) -> bool {
    line.contains("warning") || line.contains("Potential Performance Loss") || line.contains("(C75")
}

/// What the log says about spills of the kernel `name`: a line for the kernel, then one for each function that was not
/// inlined into it.
fn spills(log: &str, name: &str) -> Option<Spills> {
    const KERNEL: &str = "Compiling entry function '";
    let is_start = |line: &&str| line.split_once(KERNEL).is_some_and(|(_, rest)| rest.split('\'').next() == Some(name));
    let lines = log.lines().skip_while(|line| !is_start(line)).skip(1).take_while(|line| !line.contains(KERNEL));
    lines.filter(|line| line.contains("bytes stack frame")).fold(None, |sum, line| {
        let Spills { store_bytes, load_bytes } = sum.unwrap_or_default();
        Some(Spills {
            store_bytes: store_bytes + number_before(line, "bytes spill stores"),
            load_bytes: load_bytes + number_before(line, "bytes spill loads"),
        })
    })
}

/// The number in front of `words`; 0 where `words` do not occur.
fn number_before(text: &str, words: &str) -> u32 {
    let before = text.split_once(words).and_then(|(before, _)| before.split_whitespace().next_back());
    before.and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
