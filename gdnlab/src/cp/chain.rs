//! What a part of a sequence does to the state that it begins from, and how parts are composed.

use crate::precision::Format;
use crate::problem::{Gates, Inputs, Shape, Tensor};
use gdnlab_deps::rayon::prelude::*;

/// The call whose final state is the transition `M` of one sequence's tokens, `[1, HV, K, K]`: `M = A_T ... A_1` with
/// `A_t = (I - k_t (b_t*k_t)^T) Diag(e^{g_t})`.
///
/// The state is linear in the one it begins from, `S_T = M S_0 + S_loc`, and its columns do not mix. So `M` is what becomes
/// of the identity with values `v = 0`, with `V = K`.
pub(super) fn transition_call(inputs: &Inputs) -> Inputs {
    let key_dim = inputs.shape.key_dim;
    let shape = Shape { value_dim: key_dim, ..inputs.shape };
    let zeros = Tensor::zeros(&shape.value_dims());
    let mut identity = Tensor::zeros(&shape.state_dims(1));
    identity.data.chunks_exact_mut(key_dim * key_dim).for_each(|head| {
        head.iter_mut().step_by(key_dim + 1).for_each(|x| *x = 1.0);
    });
    let gates = match &inputs.gates {
        Gates::Gdn { g, beta } => Gates::Gdn { g: g.clone(), beta: beta.clone() },
        Gates::Gdn2 { g, b, .. } => Gates::Gdn2 { g: g.clone(), b: b.clone(), w: zeros.clone() },
    };
    Inputs {
        shape,
        cu_seqlens: inputs.cu_seqlens.clone(),
        scale: inputs.scale,
        dtype: inputs.dtype,
        q: inputs.q.clone(),
        k: inputs.k.clone(),
        v: zeros,
        gates,
        initial_state: Some(identity),
        d_o: None,
        d_final_state: None,
    }
}

/// Which way a state goes through a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// The state itself: `M S + S_loc`.
    Forward,
    /// Its gradient, against the tokens: `M^T dS + D_loc`.
    Backward,
}

/// `M state + local` of each head, or `M^T state + local`, in float64.
pub(super) fn compose(transition: &Tensor, state: &Tensor, local: &Tensor, way: Way) -> Tensor {
    let (key_dim, value_dim) = (transition.dims[3], state.dims[3]);
    let mut out = local.clone();
    let heads = out.data.par_chunks_exact_mut(key_dim * value_dim);
    let states = state.data.par_chunks_exact(key_dim * value_dim);
    let transitions = transition.data.par_chunks_exact(key_dim * key_dim);
    heads.zip(states).zip(transitions).for_each(|((out, state), transition)| {
        for (row, out) in out.chunks_exact_mut(value_dim).enumerate() {
            for (inner, state) in state.chunks_exact(value_dim).enumerate() {
                let factor = match way {
                    Way::Forward => transition[row * key_dim + inner],
                    Way::Backward => transition[inner * key_dim + row],
                };
                out.iter_mut().zip(state).for_each(|(out, x)| *out += factor * x);
            }
        }
    });
    out
}

/// A state as it is handed from rank to rank: binary64 where the kernel's inputs are that, else binary32, in which every
/// other kernel takes and gives states.
pub(super) fn to_bytes(state: &Tensor, inputs: Format) -> Vec<u8> {
    match inputs {
        Format::F64 => state.data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        _ => state.data.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
    }
}

/// Bytes of a number on its way.
pub(super) fn width(inputs: Format) -> usize {
    if inputs == Format::F64 { size_of::<f64>() } else { size_of::<f32>() }
}

/// The numbers that [`to_bytes`] wrote.
pub(super) fn from_bytes(bytes: &[u8], inputs: Format) -> Vec<f64> {
    match inputs {
        Format::F64 => bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect(),
        _ => bytes.as_chunks().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect(),
    }
}
