use super::super::config::{Mixer, Size};
use super::*;

fn config() -> ModelConfig {
    ModelConfig {
        vocabulary: 8,
        d_model: 32,
        layers: 1,
        hidden: 8,
        heads: 1,
        ..ModelConfig::preset(Mixer::Attention, Size::Tiny)
    }
}

/// Everything zero, but for the first element of the head (a matrix) and of the last norm (a vector).
fn two(matrix: f64, vector: f64) -> Parameters {
    let mut parameters = Parameters::zeros(&config());
    for (name, tensor) in parameters.iter_mut() {
        match name {
            "head" => tensor.data[0] = matrix,
            "final_norm" => tensor.data[0] = vector,
            _ => {}
        }
    }
    parameters
}

fn values(parameters: &Parameters) -> [f64; 2] {
    ["head", "final_norm"].map(|name| parameters.get(name).unwrap().data[0])
}

fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-15 * expected.abs().max(1.0), "{found} is not {expected}");
}

/// Two steps with gradients 0.5 and -0.25, without clipping:
///
/// ```text
/// m1 = 0.1 0.5 = 0.05, m1^ = 0.5         v1 = 0.05 0.25 = 0.0125, v1^ = 0.25         direction 0.5 / 0.5 = 1
/// m2 = 0.9 0.05 - 0.1 0.25 = 0.02        m2^ = 0.02 / 0.19
/// v2 = 0.95 0.0125 + 0.05 0.0625 = 0.015     v2^ = 0.015 / 0.0975
/// ```
#[test]
fn steps_equal_those_by_hand() {
    let optimizer = AdamW { eps: 1e-300, clip: f64::INFINITY, ..AdamW::default() };
    let (mut parameters, mut moments) = (two(2.0, 2.0), Moments::new(&config()));
    let norm = optimizer.step(&mut parameters, &mut moments, &two(0.5, 0.5), 0.01).unwrap();
    close(norm, 0.5f64.sqrt());
    let [matrix, vector] = values(&parameters);
    close(matrix, 2.0 - 0.01 * (1.0 + 0.1 * 2.0));
    close(vector, 2.0 - 0.01);

    optimizer.step(&mut parameters, &mut moments, &two(-0.25, -0.25), 0.02).unwrap();
    let direction = 0.02 / 0.19 / (0.015f64 / 0.0975).sqrt();
    close(values(&parameters)[0], 1.988 - 0.02 * (direction + 0.1 * 1.988));
    close(values(&parameters)[1], 1.99 - 0.02 * direction);
    close(values(&moments.m)[0], 0.02);
    close(values(&moments.v)[0], 0.015);
    assert_eq!(moments.steps, 2);
}

#[test]
fn eps_damps_small_gradients() {
    let optimizer = AdamW { eps: 0.5, ..AdamW::default() };
    let (mut parameters, mut moments) = (two(0.0, 0.0), Moments::new(&config()));
    optimizer.step(&mut parameters, &mut moments, &two(0.5, 0.0), 1.0).unwrap();
    close(values(&parameters)[0], -0.5 / (0.5 + 0.5));
    close(values(&parameters)[1], 0.0);
}

#[test]
fn a_long_gradient_is_clipped_in_its_direction() {
    let optimizer = AdamW { clip: 0.5, ..AdamW::default() };
    let (mut parameters, mut moments) = (two(0.0, 0.0), Moments::new(&config()));
    let norm = optimizer.step(&mut parameters, &mut moments, &two(3.0, -4.0), 1.0).unwrap();
    assert_eq!(norm, 5.0);
    close(values(&moments.m)[0], 0.1 * 0.3);
    close(values(&moments.m)[1], 0.1 * -0.4);
    close(values(&moments.v)[1], 0.05 * 0.16);
    let mut moments = Moments::new(&config());
    optimizer.step(&mut parameters, &mut moments, &two(0.3, 0.4), 1.0).unwrap();
    close(values(&moments.m)[0], 0.1 * 0.3);
}

#[test]
fn what_has_diverged_changes_nothing() {
    let (mut parameters, mut moments) = (two(1.0, 1.0), Moments::new(&config()));
    let step = |parameters: &mut Parameters, moments: &mut Moments, grads: &Grads| {
        AdamW::default().step(parameters, moments, grads, 0.1).unwrap_err().to_string()
    };
    assert!(step(&mut parameters, &mut moments, &two(f64::NAN, 0.0)).contains("diverged"));
    let foreign = Parameters::zeros(&ModelConfig { layers: 2, ..config() });
    assert!(step(&mut parameters, &mut moments, &foreign).contains("one model"));
    assert_eq!((parameters, moments), (two(1.0, 1.0), Moments::new(&config())));
}

#[test]
fn the_rate_rises_and_falls() {
    let schedule = Schedule { peak: 1.0, floor: 0.1, warmup: 4, steps: 12 };
    let rates: Vec<f64> = (0..13).map(|t| schedule.rate(t)).collect();
    assert_eq!(rates[..4], [0.25, 0.5, 0.75, 1.0]);
    close(rates[4], 1.0);
    close(rates[6], 0.1 + 0.9 * (1.0 + 0.5f64.sqrt()) / 2.0);
    close(rates[8], 0.55);
    close(rates[12], 0.1);
    assert!(rates[4..].windows(2).all(|pair| pair[1] < pair[0]));
    assert_eq!(schedule.rate(u64::MAX), rates[12]);
    assert_eq!(Schedule { warmup: 0, ..schedule }.rate(0), 1.0);
}

#[test]
fn senseless_constants_are_refused() {
    let default = AdamW::default();
    assert!(default.validate().is_ok());
    assert!(AdamW { clip: f64::INFINITY, ..default }.validate().is_ok());
    for (optimizer, word) in [
        (AdamW { beta1: 1.0, ..default }, "beta1 = 1"),
        (AdamW { beta2: f64::NAN, ..default }, "beta2 = NaN"),
        (AdamW { eps: 0.0, ..default }, "eps = 0"),
        (AdamW { decay: -0.1, ..default }, "weight decay = -0.1"),
        (AdamW { clip: f64::NAN, ..default }, "clip = NaN"),
    ] {
        assert!(optimizer.validate().unwrap_err().to_string().contains(word), "{word}");
    }
    let schedule = Schedule { peak: 1e-3, floor: 1e-4, warmup: 1, steps: 10 };
    assert!(schedule.validate().is_ok());
    for (schedule, word) in [
        (Schedule { peak: 0.0, ..schedule }, "from 0 to"),
        (Schedule { floor: 2e-3, ..schedule }, "floor from 0 to the peak"),
        (Schedule { floor: f64::NAN, ..schedule }, "NaN"),
        (Schedule { warmup: 10, ..schedule }, "10 of 10 steps"),
    ] {
        assert!(schedule.validate().unwrap_err().to_string().contains(word), "{word}");
    }
}

#[test]
fn constants_are_read_back_to_the_bit() {
    let optimizer = AdamW { eps: 1.0 / 3.0 * 1e-8, decay: 0.1 + 0.2, clip: f64::INFINITY, ..AdamW::default() };
    let text = serde_json::to_string(&optimizer).unwrap();
    assert_eq!(serde_json::from_str::<AdamW>(&text).unwrap(), optimizer);
    assert!(serde_json::from_str::<AdamW>(&text.replace("inf", "wide")).unwrap_err().to_string().contains("'wide'"));
}
