//! Whether the memory of this machine is enough, asked before the work that fills it.

use crate::{Error, Result};

/// Refuses what needs more than the memory that is free, where the system tells how much that is, or more than a
/// process can address.
///
/// # Errors
/// [`Error::Input`] with both amounts.
pub fn require(bytes: u128) -> Result<()> {
    match available() {
        Some(free) if bytes > u128::from(free) => Err(Error::input(format!(
            "needs about {} of memory, this machine has {} free",
            gigabytes(bytes as f64),
            gigabytes(free as f64)
        ))),
        _ if bytes > isize::MAX as u128 => {
            Err(Error::input(format!("needs about {} of memory: too much to address", gigabytes(bytes as f64))))
        }
        _ => Ok(()),
    }
}

/// How many pieces of `bytes` fit into the memory that is free; at least one, for [`require`] to refuse.
pub(crate) fn times(bytes: u128) -> usize {
    let free = available().map_or(u128::MAX, u128::from);
    usize::try_from(free / bytes.max(1)).unwrap_or(usize::MAX).max(1)
}

fn gigabytes(bytes: f64) -> String {
    format!("{:.1} GB", bytes / 1e9)
}

/// Bytes that can be allocated without swapping, as Linux estimates them.
fn available() -> Option<u64> {
    from_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn from_meminfo(text: &str) -> Option<u64> {
    let kibibytes = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?.trim().strip_suffix("kB")?;
    kibibytes.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_required_in_words() {
        assert!(require(0).is_ok());
        for bytes in [isize::MAX as u128 + 1, u128::MAX] {
            assert!(require(bytes).unwrap_err().to_string().starts_with("needs about "));
        }
    }

    #[test]
    fn at_least_one_piece_fits() {
        assert_eq!(times(u128::MAX), 1);
        assert!(times(1) > 1_000_000 && times(0) == times(1));
    }

    #[test]
    fn free_memory_is_what_linux_calls_available() {
        assert_eq!(from_meminfo("MemFree:  1 kB\nMemAvailable:    12 kB\n"), Some(12 * 1024));
        assert_eq!(from_meminfo("MemFree:  1 kB\n"), None);
    }
}
