//! Where each parameter lies in memory.
//!
//! All parameters are one contiguous array, the *arena*: the optimizer then is one kernel over all of them, and matrices that
//! multiply the same input lie one behind the other and are one matrix. In the order of the arena:
//!
//! ```text
//! embedding
//! L times:  q | k | v (| gate | a | b | 0 ..)     o     gate | up     down     (conv_q | conv_k | conv_v)
//! head                                                                        up to here with weight decay
//! L times:  mixer_norm     mlp_norm     (A_log     dt_bias     norm)
//! final_norm
//! ```
//! What is in parentheses belongs to GDN. Zeros fill up to a multiple of 64 elements before each of them, and the rows of the
//! first matrix to a multiple of 8; their gradients are zeros too, so they stay what they are.

use super::sizes::input_width;
use crate::model::config::{Mixer, ModelConfig};
use crate::model::parameters::Parameters;
use crate::problem::Tensor;
use crate::{Error, Result};
use std::collections::HashMap;
use std::ops::Range;

/// What every part begins at a multiple of, in elements: 128 bytes of bf16.
const ALIGNMENT: usize = 64;

/// The arrangement of the parameters of one model.
#[derive(Clone, Debug)]
pub(super) struct Arena {
    config: ModelConfig,
    slots: Vec<Slot>,
    /// Elements of all parts, zeros between them too.
    pub elements: usize,
    /// How many of them, from the first on, have weight decay.
    pub decayed: usize,
    pub embedding: Range<usize>,
    pub blocks: Vec<BlockParts>,
    pub final_norm: Range<usize>,
    pub head: Range<usize>,
}

/// The parts of one block.
#[derive(Clone, Debug)]
pub(super) struct BlockParts {
    pub mixer_norm: Range<usize>,
    /// `[input width, D]`: what the normed stream is multiplied by.
    pub input: Range<usize>,
    pub output: Range<usize>,
    pub gdn: Option<GdnParts>,
    pub mlp_norm: Range<usize>,
    /// `[2 F, D]`.
    pub gate_up: Range<usize>,
    pub down: Range<usize>,
}

/// The parts that only GDN has.
#[derive(Clone, Debug)]
pub(super) struct GdnParts {
    /// `[channels, 4]`.
    pub taps: Range<usize>,
    pub a_log: Range<usize>,
    pub dt_bias: Range<usize>,
    pub norm: Range<usize>,
}

/// Where one parameter lies, in the order of [`ModelConfig::parameter_tensors`].
#[derive(Clone, Debug)]
struct Slot {
    name: String,
    dims: Vec<usize>,
    first: usize,
}

impl Slot {
    fn range(&self) -> Range<usize> {
        self.first..self.first + self.dims.iter().product::<usize>()
    }
}

/// Places parts one after the other.
struct Placer {
    dims: HashMap<String, Vec<usize>>,
    firsts: HashMap<String, usize>,
    next: usize,
}

impl Placer {
    /// The parameters called `names`, without a gap, in a part of `rows` rows where that is more than they have.
    fn place(&mut self, names: &[String], rows: usize) -> Range<usize> {
        self.next = self.next.next_multiple_of(ALIGNMENT);
        let first = self.next;
        let mut columns = 1;
        for name in names {
            let dims = &self.dims[name];
            self.firsts.insert(name.clone(), self.next);
            self.next += dims.iter().product::<usize>();
            columns = dims[1..].iter().product();
        }
        self.next = self.next.max(first + rows * columns);
        first..self.next
    }

    fn one(&mut self, name: &str) -> Range<usize> {
        self.place(&[name.to_owned()], 0)
    }

    fn of_block(&mut self, layer: usize, names: &[&str], rows: usize) -> Range<usize> {
        let names: Vec<String> = names.iter().map(|name| format!("layers.{layer}.{name}")).collect();
        self.place(&names, rows)
    }
}

impl Arena {
    /// For a model that [`ModelConfig::validate`] lets pass.
    pub fn new(config: &ModelConfig) -> Self {
        let tensors = config.parameter_tensors();
        let dims = tensors.iter().map(|tensor| (tensor.name.clone(), tensor.dims.clone())).collect();
        let mut placer = Placer { dims, firsts: HashMap::new(), next: 0 };
        let is_gdn = config.mixer == Mixer::Gdn;
        let input: &[&str] = if is_gdn {
            &["mixer.q", "mixer.k", "mixer.v", "mixer.gate", "mixer.a", "mixer.b"]
        } else {
            &["mixer.q", "mixer.k", "mixer.v"]
        };
        let taps = &["mixer.conv_q", "mixer.conv_k", "mixer.conv_v"];

        let embedding = placer.one("embedding");
        let matrices: Vec<[Range<usize>; 5]> = (0..config.layers)
            .map(|layer| {
                [
                    placer.of_block(layer, input, input_width(config)),
                    placer.of_block(layer, &["mixer.o"], 0),
                    placer.of_block(layer, &["mlp.gate", "mlp.up"], 0),
                    placer.of_block(layer, &["mlp.down"], 0),
                    if is_gdn { placer.of_block(layer, taps, 0) } else { 0..0 },
                ]
            })
            .collect();
        let head = placer.one("head");
        let decayed = placer.next.next_multiple_of(ALIGNMENT);
        let blocks = matrices.into_iter().enumerate().map(|(layer, [input, output, gate_up, down, taps])| {
            let mut vector = |name: &str| placer.of_block(layer, &[name], 0);
            let (mixer_norm, mlp_norm) = (vector("mixer_norm"), vector("mlp_norm"));
            let mut of_gdn = || GdnParts {
                taps: taps.clone(),
                a_log: vector("mixer.A_log"),
                dt_bias: vector("mixer.dt_bias"),
                norm: vector("mixer.norm"),
            };
            let gdn = is_gdn.then(&mut of_gdn);
            BlockParts { mixer_norm, input, output, gdn, mlp_norm, gate_up, down }
        });
        let blocks = blocks.collect();
        let final_norm = placer.one("final_norm");
        let slots = tensors.into_iter().map(|tensor| Slot {
            first: placer.firsts[&tensor.name],
            name: tensor.name,
            dims: tensor.dims,
        });
        Self {
            config: *config,
            slots: slots.collect(),
            elements: placer.next.next_multiple_of(ALIGNMENT),
            decayed,
            embedding,
            blocks,
            final_norm,
            head,
        }
    }

    /// `parameters` as they lie in the arena, rounded to binary32.
    pub fn gather(&self, parameters: &Parameters) -> Result<Vec<f32>> {
        let mut all = vec![0.0; self.elements];
        for slot in &self.slots {
            let tensor = parameters.get(&slot.name)?;
            if tensor.dims != slot.dims {
                return Err(Error::input(format!(
                    "parameter '{}': expected shape {:?}, got {:?}",
                    slot.name, slot.dims, tensor.dims
                )));
            }
            all[slot.range()].iter_mut().zip(&tensor.data).for_each(|(to, x)| *to = *x as f32);
        }
        Ok(all)
    }

    /// The parameters that lie in the arena `all`.
    pub fn scatter(&self, all: &[f32]) -> Result<Parameters> {
        let mut slots = self.slots.iter();
        Parameters::try_from_fn(&self.config, |name| {
            let slot = slots.next().filter(|slot| slot.name == name);
            let slot = slot.ok_or_else(|| Error::input(format!("no place for the parameter '{name}'")))?;
            Tensor::new(&slot.dims, all[slot.range()].iter().map(|&x| f64::from(x)).collect())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::Size;

    fn configs() -> Vec<ModelConfig> {
        let small = |mixer| ModelConfig { layers: 3, vocabulary: 264, ..ModelConfig::preset(mixer, Size::Tiny) };
        Mixer::ALL.into_iter().flat_map(|mixer| [small(mixer), ModelConfig::preset(mixer, Size::M30)]).collect()
    }

    #[test]
    fn every_parameter_has_a_place_of_its_own() {
        for config in configs() {
            let arena = Arena::new(&config);
            let mut ranges: Vec<_> = arena.slots.iter().map(|slot| (slot.range(), slot.dims.len())).collect();
            ranges.sort_by_key(|(range, _)| range.start);
            assert!(ranges.windows(2).all(|pair| pair[0].0.end <= pair[1].0.start), "{config}");
            assert!(ranges.last().unwrap().0.end <= arena.elements);
            for (range, axes) in ranges {
                assert_eq!(range.end <= arena.decayed, axes == 2, "{config}: matrices have weight decay");
            }
            let filled = arena.elements - config.parameters().total() as usize;
            assert!(filled < arena.slots.len() * ALIGNMENT + config.layers * 8 * config.d_model);
        }
    }

    #[test]
    fn matrices_of_one_input_are_one_matrix() {
        for config in configs() {
            let arena = Arena::new(&config);
            let first =
                |name: &str| arena.slots.iter().find(|slot| slot.name == format!("layers.1.{name}")).unwrap().first;
            let block = &arena.blocks[1];
            let (keys, values, d) = (config.key_width(), config.value_width(), config.d_model);
            assert_eq!(block.input.len(), input_width(&config) * d);
            assert_eq!(first("mixer.q"), block.input.start);
            assert_eq!(first("mixer.v"), block.input.start + 2 * keys * d);
            assert_eq!(first("mlp.up"), block.gate_up.start + config.hidden * d);
            if let Some(gdn) = &block.gdn {
                assert_eq!(first("mixer.gate"), block.input.start + (2 * keys + values) * d);
                assert_eq!(first("mixer.b"), block.input.start + (2 * keys + 2 * values + config.heads) * d);
                assert_eq!(first("mixer.conv_v"), gdn.taps.start + 2 * keys * 4);
                assert_eq!(gdn.taps.len(), (2 * keys + values) * 4);
            }
            let parts = [&block.input, &block.output, &block.gate_up, &block.down, &block.mixer_norm, &arena.head];
            assert!(parts.iter().all(|part| part.start % ALIGNMENT == 0));
        }
    }

    #[test]
    fn parameters_go_there_and_back() {
        for config in configs() {
            let arena = Arena::new(&config);
            let mut parameters = Parameters::zeros(&config);
            for (n, (_, tensor)) in parameters.iter_mut().enumerate() {
                tensor.data.iter_mut().enumerate().for_each(|(i, x)| *x = (n * 1000 + i % 977) as f64);
            }
            let all = arena.gather(&parameters).unwrap();
            assert_eq!(arena.scatter(&all).unwrap(), parameters);
            let sum = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>();
            let inside = sum(&mut parameters.iter().flat_map(|(_, tensor)| tensor.data.clone()));
            assert_eq!(sum(&mut all.iter().map(|&x| f64::from(x))), inside, "zeros between the parts");
        }
        let (one, other) = (configs()[0], configs()[2]);
        assert!(Arena::new(&one).gather(&Parameters::zeros(&other)).is_err());
    }
}
