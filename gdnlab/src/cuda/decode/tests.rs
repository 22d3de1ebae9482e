use super::*;
use crate::inputs::{Regime, generate};
use crate::kernel::Kernel;
use crate::problem::{Gates, Inputs, Op, Shape};
use crate::reference::Reference;
use crate::reference::gate::{DecayForm, LogDecay};
use crate::{activation, problem::Tensor};

const CONFIG: DecodeConfig = DecodeConfig {
    qk_heads: 2,
    value_heads: 4,
    key_dim: 64,
    value_dim: 32,
    scale: 0.125,
    layout: StateLayout::KeyValue,
    slot_stride: None,
    gates: GateForm::Final,
    norm_eps: None,
};

fn complaint(config: DecodeConfig) -> String {
    config.validate(4).unwrap_err().to_string()
}

#[test]
fn configurations_that_make_no_sense_are_refused() {
    assert!(CONFIG.validate(4).is_ok());
    assert!(complaint(DecodeConfig { key_dim: 48, ..CONFIG }).contains("K = 48: expected one of 32, 64, 96"));
    assert!(complaint(DecodeConfig { value_dim: 512, ..CONFIG }).contains("V = 512"));
    assert!(complaint(DecodeConfig { qk_heads: 3, ..CONFIG }).contains("HK = 3, HV = 4"));
    assert!(complaint(DecodeConfig { qk_heads: 0, ..CONFIG }).contains("HK = 0"));
    assert!(complaint(DecodeConfig { scale: f32::NAN, ..CONFIG }).contains("NaN"));
    let gates = GateForm::Raw { beta_scale: f32::INFINITY };
    assert!(complaint(DecodeConfig { gates, ..CONFIG }).contains("inf"));
    for stride in [8191, 8193] {
        let message = complaint(DecodeConfig { slot_stride: Some(stride), ..CONFIG });
        assert!(message.contains("at least HV K V = 8192") && message.contains("4 elements"), "{message}");
    }
    assert!(DecodeConfig { slot_stride: Some(8196), ..CONFIG }.validate(4).is_ok());
    assert!(DecodeConfig { slot_stride: Some(8196), ..CONFIG }.validate(2).is_err());
}

#[test]
fn slots_are_what_the_states_have_room_for() {
    let strided = DecodeConfig { slot_stride: Some(10_000), ..CONFIG };
    for (config, length, slots) in [
        (CONFIG, 0, 0),
        (CONFIG, 8191, 0),
        (CONFIG, 8192, 1),
        (CONFIG, 3 * 8192, 3),
        (strided, 18_191, 1),
        (strided, 18_192, 2),
    ] {
        assert_eq!(config.slot_count(length, 0).unwrap(), slots, "{length}");
        assert!(config.slot_count(length, slots).is_ok());
        let error = config.slot_count(length, slots + 1).unwrap_err().to_string();
        assert!(error.contains(&format!("room for {slots} slots")), "{error}");
    }
}

#[test]
fn builds_differ_in_all_that_changes_code() {
    let builds: Vec<String> = builds().unwrap().iter().map(Build::to_string).collect();
    for wanted in
        ["STATE=float", "STATE=bf16", "INPUT=f16", "GATE=bf16", "KEY_MINOR=1", "RAW_GATES=1", "L2_NORM=1", "L2_NORM=0"]
    {
        assert!(builds.iter().any(|build| build.contains(wanted)), "{wanted}");
    }
    for dim in HEAD_DIMS {
        let (key, value) = (format!("KEY_DIM={dim} "), format!("VALUE_DIM={dim} "));
        assert!(builds.iter().any(|build| build.contains(&key)) && builds.iter().any(|build| build.contains(&value)));
    }
}

/// `[rows, K, V]` to `[rows, V, K]`.
fn transposed(states: &[f64], key_dim: usize, value_dim: usize) -> Vec<f64> {
    states
        .chunks_exact(key_dim * value_dim)
        .flat_map(|state| (0..value_dim).flat_map(move |v| (0..key_dim).map(move |k| state[k * value_dim + v])))
        .collect()
}

fn floats(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&x| x as f32).collect()
}

fn max_rel(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(0.0f64, |scale, x| scale.max(x.abs()));
    found
        .iter()
        .zip(expected)
        .fold(0.0f64, |worst, (x, y)| if x.is_nan() { f64::NAN } else { worst.max((f64::from(*x) - y).abs()) })
        / scale
}

/// Random inputs in binary32 of five sequences with an initial state.
fn inputs(config: &DecodeConfig, tokens: usize) -> Inputs {
    let shape = Shape {
        batch: 5,
        tokens,
        qk_heads: config.qk_heads,
        value_heads: config.value_heads,
        key_dim: config.key_dim,
        value_dim: config.value_dim,
    };
    let inputs = generate(Op::Gdn, &shape, Regime::MildDecay, 4).unwrap().with_initial_state(5);
    Inputs { scale: f64::from(config.scale), d_o: None, d_final_state: None, ..inputs }
        .rounded_to(crate::precision::Format::F32)
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn outputs_and_states_are_those_of_the_reference() {
    let gpu = Gpu::shared().unwrap();
    for layout in [StateLayout::KeyValue, StateLayout::ValueKey] {
        for (key_dim, value_dim) in HEAD_DIMS.into_iter().zip([128, 32, 64, 128, 192, 256]) {
            for tokens in [1, 5, 8] {
                let config = DecodeConfig { key_dim, value_dim, layout, ..CONFIG };
                let inputs = inputs(&config, tokens);
                let truth = Reference.forward(&inputs).unwrap().outputs;
                let (o, states) = decode(gpu, config, &inputs, None);
                let expected = in_layout(&config, &truth.final_state.data);
                let errors = (max_rel(&o, &truth.o.data), max_rel(&states, &expected));
                assert!(errors.0 < 3e-6 && errors.1 < 2e-6, "{config:?} T={tokens}: {errors:?}");
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn raw_gates_are_made_in_the_kernel() {
    let gpu = Gpu::shared().unwrap();
    let config = DecodeConfig { gates: GateForm::Raw { beta_scale: 2.0 }, ..CONFIG };
    let mut inputs = inputs(&config, 3);
    let raw = inputs.clone();
    let rates = [vec![0.5, -1.0, 2.0, 0.0], vec![-3.0, 0.25, -0.5, 1.0]];
    let tensor = |values: &Vec<f64>| Tensor::new(&[4], values.clone()).unwrap();
    let Gates::Gdn { g, beta } = &mut inputs.gates else { unreachable!() };
    *g = LogDecay { a: g, a_log: &tensor(&rates[0]), dt_bias: &tensor(&rates[1]), form: DecayForm::Softplus }
        .forward()
        .unwrap();
    beta.data.iter_mut().for_each(|x| *x = 2.0 * activation::sigmoid(*x));
    let truth = Reference.forward(&inputs).unwrap().outputs;
    let (o, states) = decode(gpu, config, &raw, Some(&rates));
    let errors = (max_rel(&o, &truth.o.data), max_rel(&states, &truth.final_state.data));
    assert!(errors.0 < 3e-6 && errors.1 < 2e-6, "{errors:?}");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_sequence_without_a_slot_is_skipped_and_a_wrong_size_is_refused() {
    let gpu = Gpu::shared().unwrap();
    let inputs = inputs(&CONFIG, 2);
    let decoder = Decoder::<f32, f32, f32>::new(gpu, CONFIG).unwrap();
    let on_gpu = OnGpu::new(gpu, &CONFIG, &inputs, None);
    let before = gpu.download(&on_gpu.states).unwrap();
    let slots = gpu.upload(&[4, -1, 5, 0, 1]).unwrap();
    let mut call = on_gpu;
    decoder.run(DecodeCall { slots: Some(&slots), ..call.call(5, 2) }).unwrap();
    let (o, after) = (gpu.download(&call.o).unwrap(), gpu.download(&call.states).unwrap());
    let (row, state) = (o.len() / 5, after.len() / 5);
    for sequence in 0..5 {
        let skipped = o[sequence * row..(sequence + 1) * row].iter().all(|&x| x == 0.0);
        assert_eq!(skipped, [1, 2].contains(&sequence), "sequence {sequence}");
    }
    for slot in 0..5 {
        let part = slot * state..(slot + 1) * state;
        assert_eq!(before[part.clone()] == after[part], [2, 3].contains(&slot), "slot {slot}");
    }
    let refused = |call: DecodeCall<'_, f32, f32, f32>| decoder.run(call).unwrap_err().to_string();
    assert!(refused(call.call(5, 1)).contains("q has 1280 elements: expected [B, T, HK, K], 640 elements"));
    assert!(refused(call.call(5, 9)).contains("T = 9: expected 1 to 8"));
    assert!(refused(DecodeCall { slots: Some(&gpu.upload(&[0]).unwrap()), ..call.call(5, 2) }).contains("slots has 1"));
    let (a_log, dt_bias) = (gpu.upload(&[0.0f32; 4]).unwrap(), gpu.upload(&[0.0f32; 4]).unwrap());
    let rates = Some(DecayRates { a_log: &a_log, dt_bias: &dt_bias });
    assert!(refused(DecodeCall { rates, ..call.call(5, 2) }).contains("raw gates"));
}

struct OnGpu {
    q: Buffer<f32>,
    k: Buffer<f32>,
    v: Buffer<f32>,
    g: Buffer<f32>,
    beta: Buffer<f32>,
    rates: Option<[Buffer<f32>; 2]>,
    states: Buffer<f32>,
    o: Buffer<f32>,
}

impl OnGpu {
    fn new(gpu: &Gpu, config: &DecodeConfig, inputs: &Inputs, rates: Option<&[Vec<f64>; 2]>) -> Self {
        let upload = |values: &[f64]| gpu.upload(&floats(values)).unwrap();
        let Gates::Gdn { g, beta } = &inputs.gates else { unreachable!() };
        let mut o = gpu.alloc(inputs.v.data.len()).unwrap();
        gpu.fill_bytes(&mut o, 0xff).unwrap();
        Self {
            q: upload(&inputs.q.data),
            k: upload(&inputs.k.data),
            v: upload(&inputs.v.data),
            g: upload(&g.data),
            beta: upload(&beta.data),
            rates: rates.map(|[a_log, dt_bias]| [upload(a_log), upload(dt_bias)]),
            states: upload(&in_layout(config, &inputs.initial_state.as_ref().unwrap().data)),
            o,
        }
    }

    fn call(&mut self, sequences: usize, tokens: usize) -> DecodeCall<'_, f32, f32, f32> {
        let rates = self.rates.as_ref().map(|[a_log, dt_bias]| DecayRates { a_log, dt_bias });
        let Self { q, k, v, g, beta, states, o, .. } = self;
        DecodeCall { sequences, tokens, q, k, v, g, beta, rates, states, slots: None, o }
    }
}

fn in_layout(config: &DecodeConfig, states: &[f64]) -> Vec<f64> {
    match config.layout {
        StateLayout::KeyValue => states.to_vec(),
        StateLayout::ValueKey => transposed(states, config.key_dim, config.value_dim),
    }
}

/// Outputs and states after `inputs`, five sequences with an initial state.
fn decode(
    gpu: &'static Gpu,
    config: DecodeConfig,
    inputs: &Inputs,
    rates: Option<&[Vec<f64>; 2]>,
) -> (Vec<f32>, Vec<f32>) {
    let decoder = Decoder::<f32, f32, f32>::new(gpu, config).unwrap();
    let mut on_gpu = OnGpu::new(gpu, &config, inputs, rates);
    decoder.run(on_gpu.call(inputs.shape.batch, inputs.shape.tokens)).unwrap();
    (gpu.download(&on_gpu.o).unwrap(), gpu.download(&on_gpu.states).unwrap())
}
