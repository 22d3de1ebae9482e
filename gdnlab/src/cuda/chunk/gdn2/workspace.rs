//! Memory that the kernels of GDN-2 hand each other: one allocation, cut into the tensors of `chunk.cuh`.

use super::config::Config;
use super::params::Gdn2Params;
use super::setup::Setup;
use crate::cuda::chunk::workspace::Cut;
use crate::cuda::{Buffer, Gpu};
use crate::problem::Shape;
use crate::{Error, Result};

/// The workspace of one problem.
pub(super) struct Workspace {
    memory: Buffer<u8>,
    places: Places,
}

/// Offsets of the tensors in bytes, and their size together. What is not wanted has the offset of what follows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Places {
    queries: usize,
    erase: usize,
    write_keys: usize,
    inverse: usize,
    scores: usize,
    coefficients: usize,
    segment_states: usize,
    transitions: usize,
    segment_d_states: usize,
    states: usize,
    state_scales: usize,
    writes: usize,
    write_scales: usize,
    adjoints: usize,
    adjoint_scales: usize,
    d_states: usize,
    d_state_scales: usize,
    d_o_scales: usize,
    d_queries: usize,
    d_keys: usize,
    bytes: usize,
}

impl Places {
    fn new(config: &Config, setup: &Setup, chunks: usize, segments: usize) -> Result<Self> {
        let (operand, number) = (config.sweep.variant.mode.operand_bytes(), size_of::<f32>());
        let Shape { value_heads, key_dim, value_dim, .. } = setup.shape;
        let rows = config.sweep.chunk;
        let mut cut = Cut { bytes: Some(0) };
        let of_chunk = |rest: &[usize]| [&[chunks, value_heads], rest].concat();
        let tile = of_chunk(&[rows, config.sweep.row_pitch()]);
        let square = of_chunk(&[rows, config.sweep.square_pitch()]);
        let (state, columns) = (of_chunk(&[value_dim, key_dim]), of_chunk(&[rows, value_dim]));
        let scales = of_chunk(&[value_dim / 16, 2]);
        let mut places = Self {
            queries: cut.take(operand, &tile),
            erase: cut.take(operand, &tile),
            write_keys: cut.take(operand, &tile),
            inverse: cut.take(operand, &square),
            scores: cut.take(operand, &square),
            coefficients: cut.take(number, &of_chunk(&[config.coefficient_numbers()])),
            ..Self::default()
        };
        if config.sweep.cut {
            let state = [segments, value_heads, value_dim, key_dim];
            places.segment_states = cut.take(number, &state);
            places.transitions = cut.take(number, &[segments, value_heads, 2, key_dim, key_dim]);
            if setup.backward {
                places.segment_d_states = cut.take(number, &state);
            }
        }
        if setup.backward {
            places.states = cut.take(operand, &state);
            places.state_scales = cut.take(number, &scales);
            places.writes = cut.take(operand, &columns);
            places.write_scales = cut.take(number, &scales);
            places.adjoints = cut.take(operand, &columns);
            places.adjoint_scales = cut.take(number, &scales);
            places.d_states = cut.take(operand, &state);
            places.d_state_scales = cut.take(number, &scales);
            places.d_o_scales = cut.take(number, &scales);
        }
        if setup.backward && setup.grouped() {
            let rows = [setup.tokens(), value_heads, key_dim];
            places.d_queries = cut.take(number, &rows);
            places.d_keys = cut.take(number, &rows);
        }
        let too_large = || Error::input(format!("gdn2: {}: too large to address", setup.shape));
        places.bytes = cut.bytes.ok_or_else(too_large)?;
        Ok(places)
    }
}

impl Workspace {
    /// For the problem of `setup`.
    pub fn new(gpu: &Gpu, config: &Config, setup: &Setup, chunks: usize, segments: usize) -> Result<Self> {
        let places = Places::new(config, setup, chunks, segments)?;
        Ok(Self { memory: gpu.alloc(places.bytes)?, places })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.places.bytes
    }

    pub fn memory_mut(&mut self) -> &mut Buffer<u8> {
        &mut self.memory
    }

    /// Writes the addresses into `params`; null for what is not wanted.
    pub fn enter(&self, params: &mut Gdn2Params, config: &Config, setup: &Setup) {
        let address = |offset: usize| self.memory.address() + offset as u64;
        let places = &self.places;
        let chunk = &mut params.chunk;
        chunk.queries = address(places.queries);
        chunk.keys = address(places.erase);
        params.write_keys = address(places.write_keys);
        chunk.inverse = address(places.inverse);
        chunk.scores = address(places.scores);
        chunk.coefficients = address(places.coefficients);
        if config.sweep.cut {
            chunk.segment_states = address(places.segment_states);
            chunk.transitions = address(places.transitions);
            chunk.segment_d_states = if setup.backward { address(places.segment_d_states) } else { 0 };
        }
        if setup.backward {
            chunk.states = address(places.states);
            chunk.state_scales = address(places.state_scales);
            chunk.writes = address(places.writes);
            chunk.write_scales = address(places.write_scales);
            chunk.adjoints = address(places.adjoints);
            chunk.adjoint_scales = address(places.adjoint_scales);
            chunk.d_states = address(places.d_states);
            chunk.d_state_scales = address(places.d_state_scales);
            chunk.d_o_scales = address(places.d_o_scales);
        }
        if setup.backward && setup.grouped() {
            params.d_queries = address(places.d_queries);
            params.d_keys = address(places.d_keys);
        }
    }
}
