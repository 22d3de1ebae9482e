//! Prompts that are read side by side.

use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{Inputs, Op, Results};
use crate::{Error, Result};
use std::iter::Enumerate;
use std::num::NonZero;
use std::ops::ControlFlow;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::{slice, thread};

/// A kernel that several threads share: one on a GPU is called by one of them at a time, since they would only wait for each
/// other there, with the memory of all their calls.
pub(super) struct OneAtATime<'a> {
    kernel: &'a dyn Kernel,
    turn: Mutex<()>,
}

impl<'a> OneAtATime<'a> {
    pub(super) fn new(kernel: &'a dyn Kernel) -> Self {
        Self { kernel, turn: Mutex::new(()) }
    }

    fn wait(&self) -> Option<MutexGuard<'_, ()>> {
        self.kernel.on_gpu().then(|| self.turn.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Kernel for OneAtATime<'_> {
    fn name(&self) -> &str {
        self.kernel.name()
    }

    fn summary(&self) -> String {
        self.kernel.summary()
    }

    fn needs(&self) -> &'static str {
        self.kernel.needs()
    }

    fn on_gpu(&self) -> bool {
        self.kernel.on_gpu()
    }

    fn software(&self) -> Option<String> {
        self.kernel.software()
    }

    fn has_backward(&self) -> bool {
        self.kernel.has_backward()
    }

    fn ops(&self) -> &'static [Op] {
        self.kernel.ops()
    }

    fn mode(&self) -> &'static str {
        self.kernel.mode()
    }

    fn input_format(&self) -> Format {
        self.kernel.input_format()
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        let _turn = self.wait();
        self.kernel.forward(inputs)
    }

    fn backward(&self, inputs: &Inputs) -> Result<Results> {
        let _turn = self.wait();
        self.kernel.backward(inputs)
    }
}

/// `work` of each item, in their order, by as many threads as the machine has, `most` of them at the most. They are threads
/// of their own and not those of the pool that kernels compute with: one of those, while it waits, would begin another
/// item and wait for itself. `go_on` is asked after each item, on the thread that called.
///
/// # Errors
/// [`Error::Stopped`] where `go_on` said so, else the first error of an item.
pub(super) fn side_by_side<I: Sync, T: Send>(
    items: &[I],
    most: usize,
    go_on: &mut dyn FnMut() -> ControlFlow<()>,
    work: impl Fn(&I) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    if go_on().is_break() {
        return Err(Error::Stopped);
    }
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let queue = Queue(Mutex::new(items.iter().enumerate()));
    let mut all: Vec<Option<Result<T>>> = items.iter().map(|_| None).collect();
    let mut stopped = false;
    thread::scope(|scope| {
        let (done, results) = mpsc::channel();
        for _ in 0..cores.min(most).clamp(1, items.len().max(1)) {
            let (done, queue, work) = (done.clone(), &queue, &work);
            scope.spawn(move || {
                while let Some((at, item)) = queue.next() {
                    if done.send((at, work(item))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(done);
        for (at, result) in results {
            stopped |= go_on().is_break();
            if stopped || result.is_err() {
                queue.clear();
            }
            all[at] = Some(result);
        }
    });
    if stopped {
        return Err(Error::Stopped);
    }
    // An item is only missing where another one has an error.
    all.into_iter().flatten().collect()
}

/// Items that nobody has begun.
struct Queue<'a, I>(Mutex<Enumerate<slice::Iter<'a, I>>>);

impl<'a, I> Queue<'a, I> {
    fn next(&self) -> Option<(usize, &'a I)> {
        self.lock().next()
    }

    fn clear(&self) {
        self.lock().by_ref().for_each(drop);
    }

    fn lock(&self) -> MutexGuard<'_, Enumerate<slice::Iter<'a, I>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::{Regime, generate};
    use crate::problem::Shape;
    use crate::reference::Reference;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn go_on() -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    #[test]
    fn results_have_the_order_of_the_items() {
        let items: Vec<u64> = (0..50).collect();
        // The first items take the longest.
        let work = |&item: &u64| {
            thread::sleep(std::time::Duration::from_micros(50 - item));
            Ok(item * item)
        };
        for most in [0, 1, 3, 100] {
            let found = side_by_side(&items, most, &mut go_on, work).unwrap();
            assert!(found.iter().zip(&items).all(|(found, item)| *found == item * item) && found.len() == 50);
        }
        assert!(side_by_side(&[], 4, &mut go_on, work).unwrap().is_empty());
    }

    #[test]
    fn an_error_or_a_stop_ends_it() {
        let items: Vec<usize> = (0..1000).collect();
        let begun = AtomicUsize::new(0);
        let work = |&item: &usize| {
            begun.fetch_add(1, Ordering::Relaxed);
            thread::sleep(std::time::Duration::from_micros(200));
            if item == 5 { Err(Error::input("the fifth")) } else { Ok(item) }
        };
        let error = side_by_side(&items, 2, &mut go_on, work).unwrap_err();
        assert!(error.to_string().contains("the fifth"), "{error}");
        let before = begun.swap(0, Ordering::Relaxed);
        assert!((6..500).contains(&before), "{before}");
        let mut asked = 0;
        let mut three = || {
            asked += 1;
            if asked > 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        assert!(matches!(side_by_side(&items[6..], 2, &mut three, work), Err(Error::Stopped)));
        assert!((3..500).contains(&begun.load(Ordering::Relaxed)));
    }

    /// Counts how many calls of it there are at once.
    struct Counting {
        on_gpu: bool,
        now: AtomicUsize,
        most: AtomicUsize,
    }

    impl Kernel for Counting {
        fn name(&self) -> &str {
            "counting"
        }

        fn summary(&self) -> String {
            "counts".to_owned()
        }

        fn needs(&self) -> &'static str {
            "nothing"
        }

        fn on_gpu(&self) -> bool {
            self.on_gpu
        }

        fn ops(&self) -> &'static [Op] {
            &Op::ALL
        }

        fn mode(&self) -> &'static str {
            "fp64"
        }

        fn input_format(&self) -> Format {
            Format::F64
        }

        fn forward(&self, inputs: &Inputs) -> Result<Results> {
            let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(now, Ordering::SeqCst);
            thread::sleep(std::time::Duration::from_millis(2));
            self.now.fetch_sub(1, Ordering::SeqCst);
            Reference.forward(inputs)
        }

        fn backward(&self, inputs: &Inputs) -> Result<Results> {
            Reference.backward(inputs)
        }
    }

    #[test]
    fn a_kernel_on_a_gpu_is_called_by_one_at_a_time() {
        let inputs = generate(Op::Gdn, &Shape::new(3, 1, 2, 2), Regime::Gaussian, 1).unwrap();
        let most = |on_gpu: bool| {
            let kernel = Counting { on_gpu, now: AtomicUsize::new(0), most: AtomicUsize::new(0) };
            let shared = OneAtATime::new(&kernel);
            let work = |_: &usize| shared.forward(&inputs).map(drop);
            side_by_side(&[0; 12], 4, &mut go_on, work).unwrap();
            kernel.most.into_inner()
        };
        assert_eq!(most(true), 1);
        assert!(most(false) > 1 || thread::available_parallelism().is_ok_and(|cores| cores.get() == 1));
    }
}
