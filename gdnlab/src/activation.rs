//! Scalar functions of the layers and of the gates, without overflow, and their derivatives.

/// `1 / (1 + e^-x)`, without overflow, to full relative accuracy at both ends.
pub fn sigmoid(x: f64) -> f64 {
    let e = (-x.abs()).exp();
    if x >= 0.0 { 1.0 / (1.0 + e) } else { e / (1.0 + e) }
}

/// The derivative of [`sigmoid`]: `sigmoid(x) sigmoid(-x)`.
pub fn sigmoid_slope(x: f64) -> f64 {
    sigmoid(x) * sigmoid(-x)
}

/// `log(1 + e^x)`, without overflow, to full relative accuracy at both ends. Its derivative is [`sigmoid`].
pub fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// `log sigmoid(x) = -softplus(-x)`. Its derivative is `sigmoid(-x)`.
pub fn log_sigmoid(x: f64) -> f64 {
    -softplus(-x)
}

/// `x sigmoid(x)`.
pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// The derivative of [`silu`]: `sigmoid(x) (1 + x sigmoid(-x))`.
pub fn silu_slope(x: f64) -> f64 {
    sigmoid(x) * (1.0 + x * sigmoid(-x))
}
