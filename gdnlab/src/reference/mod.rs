//! float64 ground truth: the token-by-token recurrences and the layers around them, forward and backward.

pub mod attention;
pub mod conv;
pub mod gate;
pub mod norm;
