//! The look that all figures share.

use crate::table::Mode;
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, Pos, VPos};

/// The family that is bundled for PNG.
pub const BUNDLED: &str = "DejaVu Sans";

/// Families of SVG text: the bundled one, one of the same widths, any other.
const FAMILIES: &str = "DejaVu Sans, Verdana, sans-serif";

/// Ink of titles and labels.
pub const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
/// Ink of captions, footers and tick labels.
pub const FAINT: RGBColor = RGBColor(0x66, 0x66, 0x66);
/// Grid lines.
pub const GRID: RGBColor = RGBColor(0xe4, 0xe4, 0xe4);
/// What stands out.
pub const ACCENT: RGBColor = RGBColor(0x00, 0x72, 0xb2);
/// The frame of a panel.
pub const FRAME: RGBColor = RGBColor(0x99, 0x99, 0x99);

/// Colour of a mode: from the palette of Okabe and Ito, which colour-blind readers tell apart. A mode without a colour
/// of its own is grey.
pub fn color_of(mode: &Mode) -> RGBColor {
    match mode.name.as_str() {
        "bf16" => RGBColor(0x00, 0x9e, 0x73),
        "f16-internals" => RGBColor(0x56, 0xb4, 0xe9),
        "tf32" => RGBColor(0xe6, 0x9f, 0x00),
        "fp32-tf32-solve" => ACCENT,
        "fp32" => RGBColor(0xcc, 0x79, 0xa7),
        _ => RGBColor(0x55, 0x55, 0x55),
    }
}

/// Text sizes in canvas units.
pub const TITLE: u32 = 32;
/// Size of labels, legends and notes.
pub const LABEL: u32 = 25;
/// Size of tick labels and footers.
pub const SMALL: u32 = 22;

/// A text style of `size` canvas units, anchored at `h` and `v`.
pub fn text(size: u32, color: RGBColor, h: HPos, v: VPos) -> TextStyle<'static> {
    in_style(size, FontStyle::Normal, color, Pos::new(h, v))
}

/// The same in bold.
pub fn bold(size: u32, color: RGBColor, h: HPos, v: VPos) -> TextStyle<'static> {
    in_style(size, FontStyle::Bold, color, Pos::new(h, v))
}

fn in_style(size: u32, style: FontStyle, color: RGBColor, pos: Pos) -> TextStyle<'static> {
    // The SVG backend divides every size by 1.24.
    let font = (FAMILIES, f64::from(size) * 1.24, style).into_font();
    TextStyle { font, color: color.to_backend_color(), pos }
}

/// Width of `text` in canvas units: DejaVu Sans is about 0.57 em wide on average. Only for spacing legend entries.
pub fn width(text: &str, size: u32) -> i32 {
    (0.57 * f64::from(size) * text.chars().count() as f64).round() as i32
}

/// `text` as it may stand in XML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// A colour between two others, `at` from 0 to 1.
pub fn mix(from: RGBColor, to: RGBColor, at: f64) -> RGBColor {
    let channel = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * at.clamp(0.0, 1.0)).round() as u8;
    RGBColor(channel(from.0, to.0), channel(from.1, to.1), channel(from.2, to.2))
}
