//! Figures: drawn by plotters as SVG, and rendered from that same SVG as PNG with a bundled font, so that both say the
//! same and a PNG needs no font on the machine.
//!
//! Every ready-made figure takes tables as [`crate::table`] makes them. [`Figure::draw`] gives a plotters canvas in the
//! same style for anything else.

mod axis;
mod chart;
mod panel;
mod style;

mod apart;
mod attention;
mod backends;
mod bias;
mod by_length;
mod by_row;
mod chinchilla;
mod cp;
mod emulation;
mod flips;
mod heat;
mod inputs;
mod intensity;
mod ladder;
mod losses;
mod margins;
mod per_tensor;
mod policies;
mod roofline;
mod rounding;
mod same_bits;
mod speed;
mod speed_accuracy;
mod speed_ups;
mod step_parts;

pub use apart::trainings_apart;
pub use attention::attention_backends;
pub use backends::backend_differences;
pub use bias::{bias_by_group, bias_by_tensor};
pub use by_length::error_by_length;
pub use by_row::{Rows, error_by_row};
pub use chinchilla::hours_to_chinchilla;
pub use cp::{cp_errors, cp_scaling};
pub use emulation::{Emulation, emulations};
pub use flips::flips_by_error;
pub use heat::error_by_step_and_tensor;
pub use inputs::errors_by_inputs;
pub use intensity::arithmetic_intensity;
pub use ladder::throughput_and_mfu;
pub use losses::loss_curves;
pub use margins::margin_against_shift;
pub use per_tensor::max_rel_per_tensor;
pub use policies::bytes_and_errors;
pub use roofline::roofline;
pub use rounding::rounding_by_step;
pub use same_bits::same_bits;
pub use speed::time_against_floor;
pub use speed_accuracy::speed_and_accuracy;
pub use speed_ups::speed_up_bars;
pub use step_parts::step_parts;

use crate::file::write_atomic;
use crate::{Error, Result};
use gdnlab_deps::plotters::coord::Shift;
use gdnlab_deps::plotters::prelude::{DrawingArea, DrawingAreaErrorKind, IntoDrawingArea, SVGBackend, WHITE};
use gdnlab_deps::polars::prelude::DataFrame;
use gdnlab_deps::resvg::{self, tiny_skia, usvg};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

/// Canvas units per CSS pixel of the SVG: plotters places everything at whole units.
pub const DENSITY: u32 = 2;

/// What plotters draws a figure on: `DENSITY` units per pixel.
pub type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Why plotters could not draw.
pub type DrawError = DrawingAreaErrorKind<std::io::Error>;

/// A table of errors and its name for the legend, such as `("computed here", &errors)`. The table has the columns mode,
/// T, d_k, d_v, tensor and max_rel, as [`crate::table::errors`] makes them.
pub type Named<'a> = (&'a str, &'a DataFrame);

/// A finished figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    svg: String,
    description: String,
}

impl Figure {
    /// Draws a figure of `width` x `height` pixels on a white canvas. `description` says in words what it shows, for
    /// those who cannot see it.
    ///
    /// ```
    /// use gdnlab::figure::Figure;
    /// use gdnlab_deps::plotters::prelude::*;
    /// let figure = Figure::draw((400, 300), "a circle", |canvas| {
    ///     canvas.draw(&Circle::new((400, 300), 100, BLUE.filled()))
    /// })?;
    /// assert!(figure.svg().contains("circle"));
    /// # Ok::<(), gdnlab::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Figure`] with what plotters says.
    pub fn draw(
        (width, height): (u32, u32),
        description: impl Into<String>,
        draw: impl FnOnce(&Canvas<'_>) -> Result<(), DrawError>,
    ) -> Result<Self> {
        let mut drawn = String::new();
        let failed = |error: DrawError| Error::Figure(error.to_string());
        let size = (width * DENSITY, height * DENSITY);
        {
            let canvas = SVGBackend::with_string(&mut drawn, size).into_drawing_area();
            canvas.fill(&WHITE).map_err(failed)?;
            draw(&canvas).map_err(failed)?;
            canvas.present().map_err(failed)?;
        }
        let description = description.into();
        let units = format!(r#"width="{}" height="{}" viewBox"#, size.0, size.1);
        let pixels = format!(r#"width="{width}" height="{height}" role="img" viewBox"#);
        let svg = drawn.replacen(&units, &pixels, 1).replacen(
            ">\n",
            &format!(">\n<title>{}</title>\n", style::escape(&description)),
            1,
        );
        Ok(Self { svg, description })
    }

    /// The figure as SVG text.
    pub fn svg(&self) -> &str {
        &self.svg
    }

    /// What the figure shows, in words.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// The figure as PNG, at `DENSITY` times the pixels of the SVG.
    ///
    /// # Errors
    /// [`Error::Figure`] where the SVG cannot be rendered.
    pub fn png(&self) -> Result<Vec<u8>> {
        let failed = |reason: String| Error::Figure(format!("PNG: {reason}"));
        let options =
            usvg::Options { fontdb: FONTS.clone(), font_family: style::BUNDLED.to_owned(), ..usvg::Options::default() };
        let tree = usvg::Tree::from_str(&self.svg, &options).map_err(|error| failed(error.to_string()))?;
        let density = DENSITY as f32;
        let size =
            tree.size().to_int_size().scale_by(density).ok_or_else(|| failed("the figure has no area".to_owned()))?;
        let mut pixels = tiny_skia::Pixmap::new(size.width(), size.height())
            .ok_or_else(|| failed(format!("{} x {} pixels are too many", size.width(), size.height())))?;
        resvg::render(&tree, tiny_skia::Transform::from_scale(density, density), &mut pixels.as_mut());
        pixels.encode_png().map_err(|error| failed(error.to_string()))
    }

    /// Writes `<name>.svg` and `<name>.png` into `folder` and returns both paths.
    ///
    /// # Errors
    /// [`Error::Figure`] where the PNG cannot be rendered (nothing is written then), [`Error::Io`] where a file cannot
    /// be written.
    pub fn save(&self, folder: impl AsRef<Path>, name: &str) -> Result<[PathBuf; 2]> {
        let png = self.png()?;
        let paths = ["svg", "png"].map(|extension| folder.as_ref().join(format!("{name}.{extension}")));
        write_atomic(&paths[0], self.svg.as_bytes())?;
        write_atomic(&paths[1], &png)?;
        Ok(paths)
    }
}

static FONTS: LazyLock<Arc<usvg::fontdb::Database>> = LazyLock::new(|| {
    let mut fonts = usvg::fontdb::Database::new();
    fonts.load_font_data(include_bytes!("../../fonts/DejaVuSans.ttf").to_vec());
    fonts.load_font_data(include_bytes!("../../fonts/DejaVuSans-Bold.ttf").to_vec());
    Arc::new(fonts)
});

#[cfg(test)]
mod rounding_tests;
#[cfg(test)]
mod speed_tests;
#[cfg(test)]
mod tests;
