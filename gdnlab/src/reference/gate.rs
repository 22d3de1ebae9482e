//! The gates of GDN, GDN-2 and KDA in float64, forward and backward.
//!
//! ```text
//! g = -exp(A_log) softplus(a + dt_bias)                      log decay, per head (GDN) or per channel (GDN-2, KDA)
//! g = lb sigmoid(exp(A_log) (a + dt_bias)), lb in [-5, 0)    bounded log decay
//! beta = sigmoid(x), or 2 sigmoid(x)                         write strength; times 2 allows negative eigenvalues
//! ```

use crate::activation::{sigmoid, sigmoid_slope, softplus};
use crate::problem::Tensor;
use crate::{Error, Result};

/// Smallest lower bound that the bounded log decay takes.
pub const MIN_LOWER_BOUND: f64 = -5.0;

/// How the log decay is made of its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DecayForm {
    /// `g = -exp(A_log) softplus(a + dt_bias)`, any value below 0.
    Softplus,
    /// `g = lower sigmoid(exp(A_log) (a + dt_bias))`, between `lower` and 0.
    Bounded {
        /// `lb`, in [-5, 0).
        lower: f64,
    },
}

/// The log decay from what the projection gives.
#[derive(Clone, Copy, Debug)]
pub struct LogDecay<'a> {
    /// Raw gate, `[B, T, H]`, or `[B, T, H, K]` for a decay per key channel.
    pub a: &'a Tensor,
    /// Logarithm of the rate, `[H]`, or `[H, K]` where `a` has channels.
    pub a_log: &'a Tensor,
    /// Offset of `a`, `[H]`, or `[H, K]` where `a` has channels.
    pub dt_bias: &'a Tensor,
    /// The formula.
    pub form: DecayForm,
}

/// Gradients of a [`LogDecay`], each in the shape of its tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct LogDecayGrads {
    /// Gradient of `a`.
    pub da: Tensor,
    /// Gradient of `A_log`, summed over batch and tokens, and over channels where it has none.
    pub da_log: Tensor,
    /// Gradient of `dt_bias`, summed likewise.
    pub ddt_bias: Tensor,
}

/// `g` and its partial derivatives at one element.
struct Decay {
    g: f64,
    by_a: f64,
    by_a_log: f64,
}

impl DecayForm {
    fn at(self, a_log: f64, u: f64) -> Decay {
        let rate = a_log.exp();
        match self {
            Self::Softplus => {
                let g = -rate * softplus(u);
                Decay { g, by_a: -rate * sigmoid(u), by_a_log: g }
            }
            Self::Bounded { lower } => {
                let z = rate * u;
                let slope = lower * sigmoid_slope(z);
                // Where the slope has vanished z may be infinite, and the limit of the product is 0.
                let by_a_log = if slope == 0.0 { 0.0 } else { slope * z };
                Decay { g: lower * sigmoid(z), by_a: slope * rate, by_a_log }
            }
        }
    }
}

impl LogDecay<'_> {
    /// `g`, in the shape of `a`.
    ///
    /// # Errors
    /// [`Error::Input`] where shapes do not agree, a value is not finite, `exp(A_log)` overflows or the lower bound
    /// lies outside [-5, 0).
    pub fn forward(&self) -> Result<Tensor> {
        self.validate()?;
        let data = (0..self.a.data.len()).map(|at| self.at(at).g).collect();
        Tensor::new(&self.a.dims, data)
    }

    /// The gradients of `a`, `A_log` and `dt_bias`, given that of `g`, `dg`, in the shape of `a`.
    ///
    /// # Errors
    /// As [`LogDecay::forward`], for `dg` too.
    pub fn backward(&self, dg: &Tensor) -> Result<LogDecayGrads> {
        self.validate()?;
        dg.expect("dg", &self.a.dims)?;
        let mut grads = LogDecayGrads {
            da: Tensor::zeros(&self.a.dims),
            da_log: Tensor::zeros(&self.a_log.dims),
            ddt_bias: Tensor::zeros(&self.dt_bias.dims),
        };
        for (at, dg) in dg.data.iter().enumerate() {
            let decay = self.at(at);
            let da = dg * decay.by_a;
            grads.da.data[at] = da;
            grads.ddt_bias.data[self.parameter_at(self.dt_bias, at)] += da;
            grads.da_log.data[self.parameter_at(self.a_log, at)] += dg * decay.by_a_log;
        }
        Ok(grads)
    }

    fn at(&self, at: usize) -> Decay {
        let a_log = self.a_log.data[self.parameter_at(self.a_log, at)];
        let dt_bias = self.dt_bias.data[self.parameter_at(self.dt_bias, at)];
        self.form.at(a_log, self.a.data[at] + dt_bias)
    }

    /// The element of `parameter` that belongs to the element `at` of `a`.
    fn parameter_at(&self, parameter: &Tensor, at: usize) -> usize {
        let channels = self.channels();
        if parameter.dims.len() == 2 { at % (self.a.dims[2] * channels) } else { at / channels % self.a.dims[2] }
    }

    /// `K`, or 1 where `a` has one value per head.
    fn channels(&self) -> usize {
        self.a.dims.get(3).copied().unwrap_or(1)
    }

    fn validate(&self) -> Result<()> {
        let dims = &self.a.dims;
        if !matches!(dims.len(), 3 | 4) || dims[2..].contains(&0) {
            return Err(Error::input(format!("tensor 'a': expected shape [B, T, H] or [B, T, H, K], got {dims:?}")));
        }
        self.a.expect("a", dims)?;
        for (name, parameter) in [("A_log", self.a_log), ("dt_bias", self.dt_bias)] {
            let per_channel = dims.len() == 4 && parameter.dims.len() == 2;
            parameter.expect(name, if per_channel { &dims[2..] } else { &dims[2..3] })?;
        }
        if let Some(a_log) = self.a_log.data.iter().find(|x| !x.exp().is_finite()) {
            return Err(Error::input(format!(
                "A_log = {a_log}: exp(A_log) overflows; expected the logarithm of a rate"
            )));
        }
        match self.form {
            DecayForm::Bounded { lower } if !(MIN_LOWER_BOUND..0.0).contains(&lower) => Err(Error::input(format!(
                "lower bound of the log decay = {lower}: expected at least {MIN_LOWER_BOUND} and below 0"
            ))),
            _ => Ok(()),
        }
    }
}

/// The write strength from what the projection gives.
#[derive(Clone, Copy, Debug)]
pub struct WriteStrength<'a> {
    /// Raw gate, any shape.
    pub x: &'a Tensor,
    /// Doubles beta to (0, 2), so that `I - beta k k^T` may have a negative eigenvalue.
    pub allow_neg_eigval: bool,
}

impl WriteStrength<'_> {
    /// `beta = sigmoid(x)`, doubled where negative eigenvalues are allowed; in the shape of `x`.
    ///
    /// # Errors
    /// [`Error::Input`] where a value is not finite.
    pub fn forward(&self) -> Result<Tensor> {
        self.x.expect("x", &self.x.dims)?;
        let data = self.x.data.iter().map(|&x| self.factor() * sigmoid(x)).collect();
        Tensor::new(&self.x.dims, data)
    }

    /// The gradient of `x`, given that of beta, `dbeta`, in the shape of `x`.
    ///
    /// # Errors
    /// [`Error::Input`] where shapes do not agree or a value is not finite.
    pub fn backward(&self, dbeta: &Tensor) -> Result<Tensor> {
        self.x.expect("x", &self.x.dims)?;
        dbeta.expect("dbeta", &self.x.dims)?;
        let data = self.x.data.iter().zip(&dbeta.data).map(|(&x, d)| d * self.factor() * sigmoid_slope(x)).collect();
        Tensor::new(&self.x.dims, data)
    }

    fn factor(&self) -> f64 {
        if self.allow_neg_eigval { 2.0 } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{AWKWARD_LENGTHS, Loss, check_gradient, gaussian, max_rel};
    use super::*;
    use crate::activation::{log_sigmoid, silu, silu_slope};

    const FORMS: [DecayForm; 3] =
        [DecayForm::Softplus, DecayForm::Bounded { lower: -5.0 }, DecayForm::Bounded { lower: -0.1 }];

    /// Shapes of `a`, `A_log` and `dt_bias`: GDN, and per channel with the parameters per head or per channel.
    fn shapes(tokens: usize) -> [[Vec<usize>; 3]; 3] {
        [
            [vec![2, tokens, 3], vec![3], vec![3]],
            [vec![2, tokens, 3, 4], vec![3], vec![3, 4]],
            [vec![1, tokens, 2, 3], vec![2, 3], vec![2]],
        ]
    }

    #[test]
    fn functions_equal_their_plain_forms() {
        for i in -300..=300 {
            let x = f64::from(i) / 10.0;
            let close = |found: f64, expected: f64| (found - expected).abs() <= 4.0 * f64::EPSILON * expected.abs();
            assert!(close(sigmoid(x), 1.0 / (1.0 + (-x).exp())), "{x}");
            assert!(close(silu(x), x / (1.0 + (-x).exp())), "{x}");
            assert!(close(softplus(x), x.exp().ln_1p()), "{x}");
            assert!(close(log_sigmoid(x), -(-x).exp().ln_1p()), "{x}");
        }
    }

    #[test]
    fn functions_keep_their_limits() {
        for x in [1e3, 1e9, 1e300, f64::MAX] {
            assert_eq!((sigmoid(x), sigmoid(-x)), (1.0, 0.0));
            assert_eq!((softplus(x), softplus(-x)), (x, 0.0));
            assert_eq!((log_sigmoid(x), log_sigmoid(-x)), (0.0, -x));
            assert_eq!((silu(x), silu(-x)), (x, 0.0));
            assert_eq!((silu_slope(x), silu_slope(-x)), (1.0, 0.0));
            assert_eq!(sigmoid_slope(x), 0.0);
        }
        assert_eq!(softplus(-700.0), (-700.0f64).exp());
        assert_eq!(sigmoid(-700.0), (-700.0f64).exp());
    }

    #[test]
    fn slopes_equal_differences() {
        type Function = fn(f64) -> f64;
        let x = Tensor::new(&[9], vec![-30.0, -5.0, -1.278, -0.1, 0.0, 0.3, 2.0, 7.0, 30.0]).unwrap();
        let functions: [(&str, Function, Function); 4] = [
            ("sigmoid", sigmoid, sigmoid_slope),
            ("softplus", softplus, sigmoid),
            ("log sigmoid", log_sigmoid, |x| sigmoid(-x)),
            ("silu", silu, silu_slope),
        ];
        for (name, function, slope) in functions {
            let map = |f: Function, x: &Tensor| Tensor::new(&x.dims, x.data.iter().map(|&x| f(x)).collect()).unwrap();
            let ones = Tensor::filled(&x.dims, 1.0);
            check_gradient(name, &x, &map(slope, &x), |x| Loss::new(&map(function, x), &ones));
        }
    }

    #[test]
    fn log_decay_equals_its_formula() {
        for tokens in AWKWARD_LENGTHS {
            let [[dims, head, _], ..] = shapes(tokens);
            let (a, a_log, dt_bias) = (gaussian(1, &dims), gaussian(2, &head), gaussian(3, &head));
            let plain = |form| {
                let g = |(at, a): (usize, &f64)| {
                    let (rate, u) = (a_log.data[at % 3].exp(), a + dt_bias.data[at % 3]);
                    match form {
                        DecayForm::Softplus => -rate * (1.0 + u.exp()).ln(),
                        DecayForm::Bounded { lower } => lower / (1.0 + (-rate * u).exp()),
                    }
                };
                Tensor::new(&dims, a.data.iter().enumerate().map(g).collect()).unwrap()
            };
            for form in FORMS {
                let call = LogDecay { a: &a, a_log: &a_log, dt_bias: &dt_bias, form };
                assert!(max_rel(&call.forward().unwrap(), &plain(form)) < 1e-14, "{form:?}, T = {tokens}");
            }
        }
    }

    #[test]
    fn channels_equal_heads_of_their_own() {
        let (a, rate, bias) = (gaussian(1, &[1, 5, 2, 3]), gaussian(2, &[2]), gaussian(3, &[2, 3]));
        let channels = LogDecay { a: &a, a_log: &rate, dt_bias: &bias, form: DecayForm::Softplus };
        let flat = |tensor: &Tensor, dims: &[usize]| Tensor::new(dims, tensor.data.clone()).unwrap();
        let repeated = Tensor::new(&[6], rate.data.iter().flat_map(|&r| [r; 3]).collect()).unwrap();
        let (a_flat, bias_flat) = (flat(&a, &[1, 5, 6]), flat(&bias, &[6]));
        let heads = LogDecay { a: &a_flat, a_log: &repeated, dt_bias: &bias_flat, form: DecayForm::Softplus };
        assert_eq!(channels.forward().unwrap().data, heads.forward().unwrap().data);
    }

    #[test]
    fn log_decay_gradients_equal_differences() {
        for [dims, rates, biases] in shapes(15) {
            let (a, a_log, dt_bias) = (gaussian(1, &dims), gaussian(2, &rates), gaussian(3, &biases));
            let dg = gaussian(4, &dims);
            for form in FORMS {
                let call = LogDecay { a: &a, a_log: &a_log, dt_bias: &dt_bias, form };
                let grads = call.backward(&dg).unwrap();
                let loss = |call: LogDecay| Loss::new(&call.forward().unwrap(), &dg);
                check_gradient("da", &a, &grads.da, |a| loss(LogDecay { a, ..call }));
                check_gradient("dA_log", &a_log, &grads.da_log, |a_log| loss(LogDecay { a_log, ..call }));
                check_gradient("ddt_bias", &dt_bias, &grads.ddt_bias, |dt_bias| loss(LogDecay { dt_bias, ..call }));
            }
        }
    }

    #[test]
    fn write_strength_and_its_gradient() {
        for (allow_neg_eigval, top) in [(false, 1.0), (true, 2.0)] {
            let (x, dbeta) = (gaussian(1, &[1, 15, 2]), gaussian(2, &[1, 15, 2]));
            let call = WriteStrength { x: &x, allow_neg_eigval };
            let plain = x.data.iter().map(|x| top / (1.0 + (-x).exp())).collect();
            assert!(max_rel(&call.forward().unwrap(), &Tensor::new(&x.dims, plain).unwrap()) < 1e-15);
            check_gradient("dx", &x, &call.backward(&dbeta).unwrap(), |x| {
                Loss::new(&WriteStrength { x, ..call }.forward().unwrap(), &dbeta)
            });
            let extreme = Tensor::new(&[2], vec![1e3, -1e300]).unwrap();
            let call = WriteStrength { x: &extreme, allow_neg_eigval };
            assert_eq!(call.forward().unwrap().data, [top, 0.0]);
            assert_eq!(call.backward(&Tensor::filled(&[2], 1.0)).unwrap().data, [0.0, 0.0]);
        }
    }

    #[test]
    fn extreme_values_stay_finite() {
        let a = Tensor::new(&[1, 4, 2], vec![1e3, -1e3, 1e9, -1e9, 1e100, -1e100, 0.0, 700.0]).unwrap();
        let (a_log, dt_bias) = (Tensor::new(&[2], vec![5.0, -50.0]).unwrap(), Tensor::zeros(&[2]));
        for form in FORMS {
            let call = LogDecay { a: &a, a_log: &a_log, dt_bias: &dt_bias, form };
            let (g, grads) = (call.forward().unwrap(), call.backward(&Tensor::filled(&a.dims, 1.0)).unwrap());
            for tensor in [&g, &grads.da, &grads.da_log, &grads.ddt_bias] {
                assert!(tensor.data.iter().all(|x| x.is_finite()), "{form:?}");
            }
            assert!(g.data.iter().all(|&g| g <= 0.0));
        }
        let (steep, far) = (Tensor::filled(&[1], 709.0), Tensor::filled(&[1, 1, 1], 1e300));
        let form = DecayForm::Bounded { lower: -5.0 };
        let call = LogDecay { a: &far, a_log: &steep, dt_bias: &Tensor::zeros(&[1]), form };
        let grads = call.backward(&Tensor::filled(&[1, 1, 1], 1.0)).unwrap();
        assert_eq!((grads.da.data[0], grads.da_log.data[0]), (0.0, 0.0));
    }

    #[test]
    fn bad_input_is_refused() {
        let (a, head) = (gaussian(1, &[1, 2, 3]), gaussian(2, &[3]));
        let call = LogDecay { a: &a, a_log: &head, dt_bias: &head, form: DecayForm::Softplus };
        let refused = |call: LogDecay| call.forward().unwrap_err().to_string();
        for lower in [0.0, -5.1, f64::NAN] {
            assert!(refused(LogDecay { form: DecayForm::Bounded { lower }, ..call }).contains("lower bound"));
        }
        assert!(refused(LogDecay { a_log: &Tensor::filled(&[3], 710.0), ..call }).contains("overflows"));
        assert!(refused(LogDecay { dt_bias: &a, ..call }).contains("'dt_bias'"));
        assert!(refused(LogDecay { a: &head, ..call }).contains("'a'"));
        assert!(call.backward(&head).unwrap_err().to_string().contains("'dg'"));
    }
}
