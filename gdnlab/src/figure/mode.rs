//! How a precision mode is named and coloured in every figure.

use crate::precision::Format;
use gdnlab_deps::plotters::style::RGBColor;

/// A precision mode as figures show it.
#[derive(Clone, Debug, PartialEq)]
pub struct Mode {
    /// Name in records.
    pub name: String,
    /// Name for a reader.
    pub label: String,
    /// The format whose unit roundoff its errors are held against.
    pub format: Format,
    /// Its colour: from the palette of Okabe and Ito, which colour-blind readers tell apart.
    pub color: RGBColor,
}

impl Mode {
    /// The modes with a colour of their own, coarsest first.
    fn known() -> [Self; 5] {
        let mode = |name: &str, label: &str, format, color| Self {
            name: name.to_owned(),
            label: label.to_owned(),
            format,
            color,
        };
        [
            mode("bf16", "bf16", Format::Bf16, RGBColor(0x00, 0x9e, 0x73)),
            mode("f16-internals", "fp16 internals", Format::Bf16, RGBColor(0x56, 0xb4, 0xe9)),
            mode("tf32", "TF32", Format::Tf32, RGBColor(0xe6, 0x9f, 0x00)),
            mode("fp32-tf32-solve", "fp32 with a TF32 solve", Format::F32, RGBColor(0x00, 0x72, 0xb2)),
            mode("fp32", "fp32", Format::F32, RGBColor(0xcc, 0x79, 0xa7)),
        ]
    }

    /// The mode called `name`; a mode without a colour of its own is grey.
    pub fn of(name: &str) -> Self {
        let format = if name.starts_with("bf16") {
            Format::Bf16
        } else if name.starts_with("f16") {
            Format::F16
        } else if name.starts_with("tf32") {
            Format::Tf32
        } else if name.starts_with("fp64") {
            Format::F64
        } else {
            Format::F32
        };
        Self::known().into_iter().find(|mode| mode.name == name).unwrap_or_else(|| Self {
            name: name.to_owned(),
            label: name.to_owned(),
            format,
            color: RGBColor(0x55, 0x55, 0x55),
        })
    }

    /// The modes of `names`, each once: the known ones coarsest first, then the others as they come.
    pub fn all_of<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<Self> {
        let known = Self::known();
        let mut modes: Vec<Self> = Vec::new();
        for name in names {
            if !modes.iter().any(|mode| mode.name == name) {
                modes.push(Self::of(name));
            }
        }
        modes.sort_by_key(|mode| known.iter().position(|k| k.name == mode.name).unwrap_or(known.len()));
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
    fn every_known_mode_has_its_own_colour() {
        let known = Mode::known();
        for (i, mode) in known.iter().enumerate() {
            assert!(known[..i].iter().all(|other| other.color != mode.color), "{}", mode.name);
        }
    }
}
