use super::super::exchange::virtual_ranks;
use super::super::slice::join;
use super::super::{Cut, VIRTUAL_TIMEOUT, gather, together};
use super::*;
use crate::compare::compare_results;
use crate::inputs::{Regime, generate};
use crate::kernel::kernel;
use crate::problem::{Op, Results};

impl Resident {
    /// What its calls gave, in the order of their tokens.
    fn results(&self, backward: bool) -> Result<Option<Results>> {
        let order = [Call::Entering, Call::Own, Call::Free, Call::Leaving, Call::Spanned];
        let kept = order.iter().filter_map(|call| self.call(*call).ok());
        let results = kept.map(|call| match call {
            DeviceCall::Gdn(plan) => plan.results(backward),
            DeviceCall::Gdn2(plan) => plan.results(backward),
        });
        let results = results.collect::<Result<Vec<Results>>>()?;
        if results.is_empty() { Ok(None) } else { join(&results.iter().collect::<Vec<_>>()).map(Some) }
    }
}

/// Of a binary32 kernel, so that what differs is the composition: in float64 there, in binary32 here.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn tensors_that_stay_on_the_gpu_are_those_of_ranks_that_copy_them() {
    for (op, name) in [(Op::Gdn, "cuda-chunk-fp32"), (Op::Gdn2, "cuda-gdn2-fp32")] {
        let (kernel, on_gpu) = (kernel(name).unwrap(), ChunkKernel::named(name).unwrap());
        let inputs = generate(op, &Shape::new(290, 2, 32, 32), Regime::MildDecay, 4).unwrap().with_initial_state(4);
        let inputs = inputs.packed(&[0, 40, 240, 240, 290], 4).unwrap().rounded_to(kernel.input_format());
        for borders in [vec![0, 290], vec![0, 40, 240, 290], vec![0, 20, 90, 91, 91, 230, 290]] {
            let cut = Cut::at(borders).unwrap();
            for backward in [false, true] {
                let expected = together(kernel.as_ref(), &inputs, &cut, backward).unwrap().results;
                let found = virtual_ranks(cut.ranks(), VIRTUAL_TIMEOUT, |exchange| {
                    let part = Part::of(&inputs, &cut, exchange.rank())?;
                    let mut resident = Resident::new(&on_gpu, &part, &inputs.shape, backward)?;
                    let times = resident.time(exchange, 1)?;
                    assert_eq!((times.total_ms.len(), times.steps[0].len()), (1, resident.script.len()));
                    resident.results(backward)
                });
                let found = gather(&inputs, &cut, &found.unwrap()).unwrap();
                for tensor in compare_results(&found, &expected).unwrap() {
                    let limit = if cut.crossings(&inputs) == 0 { 0.0 } else { 1e-5 };
                    assert!(
                        tensor.nonfinite == 0 && tensor.max_rel <= limit,
                        "{name} {cut}, backward {backward}, {}: {:.2e}",
                        tensor.tensor,
                        tensor.max_rel
                    );
                }
            }
        }
    }
}
