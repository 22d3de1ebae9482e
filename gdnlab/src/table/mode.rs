//! Precision modes as tables and figures name them.

use crate::precision::Format;

/// A precision mode for a reader.
#[derive(Clone, Debug, PartialEq)]
pub struct Mode {
    /// Name in records.
    pub name: String,
    /// Name for a reader.
    pub label: String,
    /// The format whose unit roundoff its errors are held against: the one that the mode claims to compute in.
    pub format: Format,
}

/// The modes that have a label of their own, coarsest first.
const KNOWN: [(&str, &str, Format); 5] = [
    ("bf16", "bf16", Format::Bf16),
    ("f16-internals", "fp16 internals", Format::Bf16),
    ("tf32", "TF32", Format::Tf32),
    ("fp32-tf32-solve", "fp32 with a TF32 solve", Format::F32),
    ("fp32", "fp32", Format::F32),
];

impl Mode {
    /// The mode called `name`. One that has no label keeps its name, and its format is the one that the name begins with,
    /// or else fp32.
    pub fn of(name: &str) -> Self {
        let prefixes = [("fp64", Format::F64), ("tf32", Format::Tf32), ("bf16", Format::Bf16), ("fp16", Format::F16)];
        let (label, format) = match KNOWN.iter().find(|(known, ..)| *known == name) {
            Some((_, label, format)) => (*label, *format),
            None => {
                let of_prefix = prefixes.iter().find(|(prefix, _)| name.starts_with(prefix));
                (name, of_prefix.map_or(Format::F32, |(_, format)| *format))
            }
        };
        Self { name: name.to_owned(), label: label.to_owned(), format }
    }

    /// The modes of `names`, each once: the known ones coarsest first, then the others as they come.
    pub fn all_of<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<Self> {
        let mut modes: Vec<Self> = super::rows::distinct(names.into_iter()).into_iter().map(Self::of).collect();
        modes.sort_by_key(|mode| KNOWN.iter().position(|(known, ..)| *known == mode.name).unwrap_or(KNOWN.len()));
        modes
    }

    /// Its unit roundoff as it is written in a figure: `u(bf16)`.
    pub fn roundoff_label(&self) -> String {
        format!("u({})", format_label(self.format))
    }

    /// Unit roundoff that its errors are held against.
    pub fn unit_roundoff(&self) -> f64 {
        self.format.unit_roundoff()
    }
}

/// The name of a format for a reader.
pub fn format_label(format: Format) -> &'static str {
    match format {
        Format::F64 => "fp64",
        Format::F32 => "fp32",
        Format::F16 => "fp16",
        Format::Bf16 => "bf16",
        // However its operands were rounded.
        _ => "TF32",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_come_once_and_coarsest_first() {
        let modes = Mode::all_of(["mine", "fp32", "bf16", "fp32", "tf32"]);
        let names: Vec<&str> = modes.iter().map(|mode| mode.name.as_str()).collect();
        assert_eq!(names, ["bf16", "tf32", "fp32", "mine"]);
        assert_eq!(modes[0].unit_roundoff(), 2f64.powi(-8));
    }

    #[test]
    fn unknown_modes_keep_their_name_and_the_format_it_begins_with() {
        let mode = Mode::of("bf16-mine");
        assert_eq!((mode.label.as_str(), mode.format), ("bf16-mine", Format::Bf16));
        assert_eq!(Mode::of("mine").format, Format::F32);
    }
}
