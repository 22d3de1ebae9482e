//! Whether the ground truth itself can be trusted.

use crate::problem::{Results, Tensor};
use crate::{Error, Result};

/// Refuses a ground truth that is not finite: finite inputs can still make the recurrence grow beyond binary64, as keys
/// of norm 500 or a positive `g` do, and then no kernel is to blame for what it gives.
///
/// # Errors
/// [`Error::Input`] with the first tensor of [`Results::named`] that is not finite and its first token.
pub fn check_truth(truth: &Results) -> Result<()> {
    let broken = truth.named().into_iter().find_map(|(name, tensor)| Some((name, first_token(name, tensor)?)));
    let Some((name, token)) = broken else { return Ok(()) };
    let place = match token {
        Some(token) if name == "o" => format!(" from t={token} on"),
        Some(token) => format!(" at t={token}"),
        None => String::new(),
    };
    Err(Error::input(format!(
        "the float64 truth itself is not finite{place} (tensor {name}): are q and k normalised and g <= 0?"
    )))
}

/// The first token with a value that is not finite, inside `None` for a state, which has no tokens; `None` where all
/// are finite.
fn first_token(name: &str, tensor: &Tensor) -> Option<Option<usize>> {
    let broken = tensor.data.iter().enumerate().filter(|(_, x)| !x.is_finite()).map(|(at, _)| at);
    if matches!(name, "final_state" | "dh0") {
        return broken.take(1).map(|_| None).next();
    }
    broken.map(|at| tensor.index_of(at)[1]).min().map(Some)
}
