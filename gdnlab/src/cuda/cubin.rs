//! Reads from a CUBIN, which is a 64-bit little-endian ELF image, what the driver will check a launch against.
//!
//! The section `.nv.info.<kernel>` is a list of attributes: a byte for the form, a byte for the kind, and either a 16-bit
//! value (form 3) or a 16-bit length with that many bytes after it (form 4).

/// Facts about one kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// Size of its parameters in bytes, which is that of the one structure that kernels here take.
    pub parameter_bytes: u32,
    /// Threads of a block at the most, where the kernel's `__launch_bounds__` says so.
    pub max_threads: Option<u32>,
}

const FORM_LONG: u8 = 4;
const PARAMETER_BYTES: u8 = 0x19;
const MAX_THREADS: u8 = 0x05;

/// Facts about the kernel `name` of `image`; zeros for what the image does not tell.
pub(super) fn facts(image: &[u8], name: &str) -> Facts {
    let mut facts = Facts::default();
    let mut rest = section(image, &format!(".nv.info.{name}")).unwrap_or_default();
    while let [form, kind, low, high, tail @ ..] = rest {
        let value = u16::from_le_bytes([*low, *high]);
        let payload = if *form == FORM_LONG { tail.get(..usize::from(value)) } else { Some(&tail[..0]) };
        let Some(payload) = payload else { break };
        match *kind {
            PARAMETER_BYTES => facts.parameter_bytes = u32::from(value),
            MAX_THREADS => facts.max_threads = (0..3).map(|axis| u32_at(payload, 4 * axis)).product(),
            _ => {}
        }
        rest = &tail[payload.len()..];
    }
    facts
}

/// The bytes of the section `name`.
fn section<'a>(image: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let table = u64_at(image, 0x28)? as usize;
    let (size, count, names) = (u16_at(image, 0x3a)?, u16_at(image, 0x3c)?, u16_at(image, 0x3e)?);
    let header = |index: u16| image.get(table.checked_add(usize::from(index) * usize::from(size))?..);
    let contents = |header: &[u8]| {
        let (start, length) = (u64_at(header, 0x18)? as usize, u64_at(header, 0x20)? as usize);
        image.get(start..start.checked_add(length)?)
    };
    let names = contents(header(names)?)?;
    (0..count).filter_map(header).find_map(|header| {
        let own = names.get(u32_at(header, 0)? as usize..)?.split(|&byte| byte == 0).next()?;
        if own == name.as_bytes() { contents(header) } else { None }
    })
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}
