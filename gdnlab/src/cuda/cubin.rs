//! Reads from a CUBIN, which is a 64-bit little-endian ELF image, which kernels are in it and what a launch of each is
//! checked against.
//!
//! A kernel is a function in the symbol table with the mark of an entry point in its `st_other`. The section
//! `.nv.info.<kernel>` is a list of attributes of the kernel, `.nv.info` one of all functions, and `.nv.shared.<kernel>` is
//! as long as its static shared memory. An attribute has a byte for the form, a byte for the kind, and either a 16-bit
//! value (form 3) or a 16-bit length with that many bytes after it (form 4); in `.nv.info` these are the index of the
//! function's symbol and the value, 32 bits each.

use super::report::FunctionReport;

const SYMBOL_BYTES: usize = 24;
const TYPE_FUNCTION: u8 = 2;
const ENTRY_POINT: u8 = 0x10;

const FORM_LONG: u8 = 4;
const MAX_THREADS: u8 = 0x05;
const STACK_BYTES: u8 = 0x12;
const PARAMETER: u8 = 0x17;
const REGISTERS: u8 = 0x2f;

/// A section that only code for compute capability 9.0 and newer has. There the system's part of a block's shared memory
/// lies before the kernel's, and is part of `.nv.shared.<kernel>`.
const SYSTEM_SHARED: &str = ".nv.shared.reserved.0";
const SYSTEM_SHARED_BYTES: u32 = 1024;

/// The kernels of `image`, in the order of their names, with what the image tells about each: all but spills. None where
/// it is no CUBIN.
pub(super) fn kernels(image: &[u8]) -> Vec<FunctionReport> {
    let mut kernels = Image::read(image).and_then(|image| image.kernels()).unwrap_or_default();
    kernels.sort_by(|a, b| a.name.cmp(&b.name));
    kernels
}

/// A CUBIN with its table of sections.
struct Image<'a> {
    bytes: &'a [u8],
    headers: Vec<&'a [u8]>,
    names: &'a [u8],
}

impl<'a> Image<'a> {
    fn read(bytes: &'a [u8]) -> Option<Self> {
        let table = u64_at(bytes, 0x28)? as usize;
        let (size, count, names) = (u16_at(bytes, 0x3a)?, u16_at(bytes, 0x3c)?, u16_at(bytes, 0x3e)?);
        let header = |index: u16| bytes.get(table.checked_add(usize::from(index) * usize::from(size))?..);
        let headers = (0..count).map(header).collect::<Option<Vec<_>>>()?;
        let names = contents(bytes, headers.get(usize::from(names))?)?;
        Some(Self { bytes, headers, names })
    }

    fn kernels(&self) -> Option<Vec<FunctionReport>> {
        let (symbols, names) = (self.section(".symtab")?, self.section(".strtab")?);
        let is_kernel = |symbol: &[u8]| symbol[4] & 0xf == TYPE_FUNCTION && symbol[5] & ENTRY_POINT != 0;
        let symbols = symbols.chunks_exact(SYMBOL_BYTES).enumerate().filter(|(_, symbol)| is_kernel(symbol));
        symbols.map(|(index, symbol)| Some(self.kernel(index, text_at(names, u32_at(symbol, 0)?)?))).collect()
    }

    /// The kernel `name`, whose symbol has the number `index`.
    fn kernel(&self, index: usize, name: &str) -> FunctionReport {
        let mut report =
            FunctionReport { name: name.to_owned(), shared_bytes: self.shared_bytes(name), ..Default::default() };
        for Attribute { kind, payload } in self.attributes(".nv.info") {
            match (kind, u32_at(payload, 0), u32_at(payload, 4)) {
                (REGISTERS, Some(of), Some(count)) if of as usize == index => report.registers = count,
                (STACK_BYTES, Some(of), Some(bytes)) if of as usize == index => report.stack_bytes = bytes,
                _ => {}
            }
        }
        for Attribute { kind, payload } in self.attributes(&format!(".nv.info.{name}")) {
            match kind {
                // The upper 14 bits of its third word are its size.
                PARAMETER => report.parameter_bytes += u32_at(payload, 8).unwrap_or(0) >> 18,
                MAX_THREADS => {
                    let product = |product: u32, axis: usize| product.checked_mul(u32_at(payload, 4 * axis)?);
                    report.max_threads = (0..3).try_fold(1, product);
                }
                _ => {}
            }
        }
        report
    }

    /// Static shared memory of the kernel `name`. The section has no contents in the file, only a length.
    fn shared_bytes(&self, name: &str) -> u32 {
        let length = |header: &[u8]| u32::try_from(u64_at(header, 0x20)?).ok();
        let bytes = self.header(&format!(".nv.shared.{name}")).and_then(length).unwrap_or(0);
        let of_system = if self.header(SYSTEM_SHARED).is_some() { SYSTEM_SHARED_BYTES } else { 0 };
        bytes.saturating_sub(of_system)
    }

    /// The attributes in the section `name`, up to its end or to the first that is cut off.
    fn attributes(&self, name: &str) -> impl Iterator<Item = Attribute<'a>> {
        let mut rest = self.section(name).unwrap_or_default();
        std::iter::from_fn(move || {
            let [form, kind, low, high, tail @ ..] = rest else { return None };
            let value = u16::from_le_bytes([*low, *high]);
            let length = if *form == FORM_LONG { usize::from(value) } else { 0 };
            let (payload, next) = tail.split_at_checked(length)?;
            rest = next;
            Some(Attribute { kind: *kind, payload })
        })
    }

    fn header(&self, name: &str) -> Option<&'a [u8]> {
        self.headers.iter().copied().find(|header| {
            let own = u32_at(header, 0).and_then(|at| text_at(self.names, at));
            own == Some(name)
        })
    }

    fn section(&self, name: &str) -> Option<&'a [u8]> {
        contents(self.bytes, self.header(name)?)
    }
}

/// The bytes of the section with this header.
fn contents<'a>(image: &'a [u8], header: &[u8]) -> Option<&'a [u8]> {
    let (start, length) = (u64_at(header, 0x18)? as usize, u64_at(header, 0x20)? as usize);
    image.get(start..start.checked_add(length)?)
}

struct Attribute<'a> {
    kind: u8,
    payload: &'a [u8],
}

/// The text at `at` that ends with NUL.
fn text_at(bytes: &[u8], at: u32) -> Option<&str> {
    std::str::from_utf8(bytes.get(at as usize..)?.split(|&byte| byte == 0).next()?).ok()
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

#[cfg(test)]
#[path = "cubin_tests.rs"]
mod tests;
