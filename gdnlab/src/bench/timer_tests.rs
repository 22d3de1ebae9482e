use super::*;

fn samples(ms: &[f64]) -> Samples {
    Samples::new(ms.to_vec()).unwrap()
}

#[test]
fn percentiles_lie_between_the_samples_next_to_them() {
    let eleven = samples(&[10.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
    assert_eq!((eleven.p20(), eleven.median(), eleven.p80()), (2.0, 5.0, 8.0));
    let four = samples(&[4.0, 1.0, 3.0, 2.0]);
    assert_eq!(four.median(), 2.5);
    assert!((four.p20() - 1.6).abs() < 1e-12 && (four.p80() - 3.4).abs() < 1e-12);
    assert_eq!(four.ms(), [4.0, 1.0, 3.0, 2.0], "in the order in which they were taken");
    let one = samples(&[7.0]);
    assert_eq!((one.p20(), one.median(), one.p80()), (7.0, 7.0, 7.0));
}

#[test]
fn no_samples_and_no_numbers_are_refused() {
    for ms in [vec![], vec![f64::NAN], vec![1.0, f64::INFINITY]] {
        assert!(matches!(Samples::new(ms), Err(Error::Input(_))));
    }
    assert!(Budget::of_samples(0).is_err());
}

const QUICK: Budget =
    Budget { warm_up: Duration::ZERO, min_samples: 3, max_samples: 50, time: Duration::from_millis(20) };

fn go_on() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn a_budget_is_kept() {
    assert_eq!(sample(&QUICK, &mut go_on, || Ok(1.0)).unwrap().ms().len(), 50);
    let slow = || {
        std::thread::sleep(Duration::from_millis(15));
        Ok(1.0)
    };
    assert_eq!(sample(&QUICK, &mut go_on, slow).unwrap().ms().len(), 3);
    let seven = Budget { time: Duration::ZERO, ..Budget::of_samples(7).unwrap() };
    assert_eq!(sample(&seven, &mut go_on, || Ok(1.0)).unwrap().ms().len(), 7);
}

#[test]
fn a_stop_keeps_samples_that_are_enough() {
    let taken_of = |stop_before: usize| {
        let mut asked = 0;
        let mut go_on = || {
            asked += 1;
            if asked > stop_before { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        sample(&QUICK, &mut go_on, || Ok(1.0)).map(|samples| samples.ms().len())
    };
    assert_eq!(taken_of(5).unwrap(), 5);
    assert!(matches!(taken_of(2), Err(Error::Stopped)));
}

#[test]
fn what_fails_ends_the_samples() {
    assert!(sample(&QUICK, &mut go_on, || Err(Error::gpu("failed"))).is_err());
}

/// A copy of many times the cache takes as long as the roofline says, and one that the cache could hold does not take
/// less than the memory allows: the cache was flushed.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_cache_is_cold_at_each_sample() {
    let gpu = Gpu::shared().unwrap();
    let mut timer = Timer::new(gpu, Budget::default()).unwrap();
    let rate = super::super::roofline::copy_bandwidth(&mut timer, &mut go_on).unwrap().bytes_per_s;
    let bytes = gpu.l2_bytes / 4;
    let (from, mut to) = (gpu.upload(&vec![1u8; bytes]).unwrap(), gpu.alloc::<u8>(bytes).unwrap());
    let cold = timer.time(|stream| stream.copy(&from, &mut to), &mut go_on).unwrap();
    let reading_ms = 1e3 * bytes as f64 / rate;
    println!("copy {:.0} GB/s; {bytes} bytes read in {:.4} ms, roofline {reading_ms:.4} ms", rate / 1e9, cold.median());
    assert!(cold.median() > 0.5 * reading_ms);
}
