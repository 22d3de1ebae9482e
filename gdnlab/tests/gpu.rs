//! The CUDA layer on a GPU: `cargo test --test gpu -- --ignored` where there is one.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use gdnlab::cuda::{
    Build, Compiler, CopyKernel, Function, Gpu, Grid, Module, Source, Swizzle, TensorMap, TileFormat, Tiles,
};
use gdnlab::record::Environment;
use std::sync::Arc;
use std::time::Instant;

const KERNELS: &str = r#"
struct Params { float* x; int n; float factor; };
extern "C" __global__ void __launch_bounds__(128) scale(const __grid_constant__ Params p) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.x[i] *= p.factor;
}
// Turns n numbers around by way of dynamic shared memory.
extern "C" __global__ void turn(const __grid_constant__ Params p) {
    extern __shared__ float shared[];
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) shared[i] = p.x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) p.x[i] = shared[p.n - 1 - i];
}
#if __CUDA_ARCH__ >= 900
// Each block writes its rank in its cluster.
extern "C" __global__ void rank(const __grid_constant__ Params p) {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) p.x[blockIdx.x] = rank;
}
struct alignas(128) TensorMap { unsigned long long opaque[16]; };
struct Tile { TensorMap map; float* x; };
// Copies the 4 x 32 tile at column 32, row 2 with the copy engine.
extern "C" __global__ void tile(const __grid_constant__ Tile p) {
    __shared__ alignas(128) float tile[128];
    __shared__ unsigned long long barrier;
    unsigned to = (unsigned)__cvta_generic_to_shared(tile), at = (unsigned)__cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 512;" ::"r"(at) : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
            ::"r"(to), "l"(&p.map), "r"(32), "r"(2), "r"(at) : "memory");
    }
    __syncthreads();
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], 0;\n@!done bra again;\n}"
        ::"r"(at) : "memory");
    p.x[threadIdx.x] = tile[threadIdx.x];
}
#endif
"#;

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    x: u64,
    n: i32,
    factor: f32,
}

fn module(gpu: &Gpu) -> Arc<Module> {
    let source = Source::new("layer.cu", KERNELS).unwrap();
    gpu.module(&Build { source, defines: vec![] }).unwrap()
}

fn function(name: &str) -> (&'static Gpu, Function) {
    let gpu = Gpu::shared().unwrap();
    (gpu, module(gpu).function(name).unwrap())
}

fn grid(n: usize) -> Grid {
    Grid { blocks: [n.div_ceil(128) as u32, 1, 1], threads: 128, ..Grid::default() }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn memory_goes_there_and_back() {
    let gpu = Gpu::shared().unwrap();
    let values: Vec<f64> = (0..100_000).map(f64::from).collect();
    let mut buffer = gpu.upload(&values).unwrap();
    assert_eq!(buffer.address() % 256, 0);
    assert_eq!(gpu.download(&buffer).unwrap(), values);
    let mut copy = gpu.alloc(values.len()).unwrap();
    gpu.stream().copy(&buffer, &mut copy).unwrap();
    gpu.fill_bytes(&mut buffer, 0xff).unwrap();
    assert!(gpu.download(&buffer).unwrap().iter().all(|x| x.is_nan()));
    assert_eq!(gpu.download(&copy).unwrap(), values);
    let mut empty = gpu.upload::<f32>(&[]).unwrap();
    gpu.fill_bytes(&mut empty, 0xff).unwrap();
    assert!(gpu.download(&empty).unwrap().is_empty());
    let error = gpu.upload(&[1.0f32]).and_then(|mut one| gpu.stream().upload(&[1.0, 2.0], &mut one)).unwrap_err();
    assert!(error.to_string().contains("2 elements into a buffer of 1"), "{error}");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_kernel_that_copies_copies_all_of_it() {
    let gpu = Gpu::shared().unwrap();
    let kernel = CopyKernel::new(gpu).unwrap();
    // Less than a thread each, a round and a bit, and many rounds with a ragged end.
    for accesses in [0, 1, 1000, 8 * 256 * gpu.multiprocessors as usize * 4 + 3, 10_000_019] {
        let values: Vec<u64> = (0..2 * accesses as u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let (from, mut to) = (gpu.upload(&values).unwrap(), gpu.upload(&vec![7u64; values.len()]).unwrap());
        kernel.copy(gpu.stream(), &from, &mut to).unwrap();
        assert!(gpu.download(&to).unwrap() == values, "{accesses} accesses");
    }
    let (three, mut four) = (gpu.upload(&[1u64; 3]).unwrap(), gpu.upload(&[1u64; 4]).unwrap());
    let mut other = gpu.upload(&[1u64; 3]).unwrap();
    assert!(kernel.copy(gpu.stream(), &three, &mut four).is_err());
    let error = kernel.copy(gpu.stream(), &three, &mut other).unwrap_err().to_string();
    assert!(error.contains("24 bytes") && error.contains("multiple of 16"), "{error}");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn more_memory_than_there_is_is_an_error_and_the_gpu_goes_on() {
    let gpu = Gpu::shared().unwrap();
    let error = gpu.alloc::<u8>(2 * gpu.memory_bytes).unwrap_err().to_string();
    assert!(error.contains("CUDA_ERROR_OUT_OF_MEMORY") && error.contains("smaller problem"), "{error}");
    assert!(gpu.alloc::<u64>(usize::MAX).is_err());
    assert_eq!(gpu.download(&gpu.upload(&[1, 2, 3]).unwrap()).unwrap(), [1, 2, 3]);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_kernel_runs_with_the_shared_memory_that_it_asks_for() {
    let (gpu, turn) = function("turn");
    // A small launch first: it must not take away what the large one may have.
    for n in [100, gpu.shared_bytes_per_block as usize / 4] {
        let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let x = gpu.upload(&values).unwrap();
        let grid = Grid { threads: 256, shared_bytes: 4 * n as u32, ..Grid::default() };
        let params = Params { x: x.address(), n: n as i32, factor: 0.0 };
        // SAFETY: `x` holds `n` floats until the download.
        unsafe { turn.launch(gpu.stream(), grid, &params).unwrap() };
        assert!(gpu.download(&x).unwrap().iter().eq(values.iter().rev()));
        let grid = Grid { shared_bytes: gpu.shared_bytes_per_block + 4, ..grid };
        // SAFETY: nothing is launched.
        let error = unsafe { turn.launch(gpu.stream(), grid, &params) }.unwrap_err().to_string();
        assert!(error.contains("bytes of shared memory"), "{error}");
    }
}

/// From CUDA 12.9 on the compiler has a cache of its own, once the driver runs; what came from there had no log.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn compiling_twice_says_the_same_twice() {
    let gpu = Gpu::shared().unwrap();
    let build = Build { source: Source::new("layer.cu", KERNELS).unwrap(), defines: vec![] };
    let compiler = Compiler::find().unwrap();
    let first = build.compile(gpu.architecture(), &compiler).unwrap();
    assert_eq!(build.compile(gpu.architecture(), &compiler).unwrap(), first);
    assert!(first.report.functions.iter().all(|function| function.spills.is_some()), "{}", first.log);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_does_not_fit_the_kernel_is_refused() {
    let (gpu, scale) = function("scale");
    let x = gpu.upload(&[1.0f32]).unwrap();
    // SAFETY: nothing is launched.
    let error = unsafe { scale.launch(gpu.stream(), grid(1), &x.address()) }.unwrap_err().to_string();
    assert!(error.contains("16 bytes in CUDA and 8 in Rust"), "{error}");
    let params = Params { x: x.address(), n: 1, factor: 2.0 };
    // SAFETY: nothing is launched.
    unsafe { scale.launch(gpu.stream(), Grid { blocks: [0, 1, 1], ..grid(1) }, &params).unwrap() };
    assert_eq!(gpu.download(&x).unwrap(), [1.0]);
    let error = module(gpu).function("scales").err().unwrap().to_string();
    assert!(error.contains("scales") && error.contains("scale, "), "{error}");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_graph_does_the_recorded_work_at_each_replay() {
    let (gpu, scale) = function("scale");
    let x = gpu.upload(&vec![1.0f32; 1000]).unwrap();
    let params = Params { x: x.address(), n: 1000, factor: 2.0 };
    let graph = gpu
        .capture(|stream| {
            for _ in 0..3 {
                // SAFETY: `x` outlives the graph's last replay.
                unsafe { scale.launch(stream, grid(1000), &params)? };
            }
            Ok(())
        })
        .unwrap();
    assert_eq!(gpu.download(&x).unwrap()[999], 1.0, "recording runs nothing");
    let (start, end) = (gpu.event().unwrap(), gpu.event().unwrap());
    start.record(gpu.stream()).unwrap();
    for _ in 0..2 {
        graph.replay(gpu.stream()).unwrap();
    }
    end.record(gpu.stream()).unwrap();
    assert!(start.elapsed_ms(&end).unwrap() > 0.0);
    assert!(gpu.download(&x).unwrap().iter().all(|&x| x == 64.0));
    assert!(gpu.capture(|_| Err(gdnlab::Error::Stopped)).is_err());
    graph.replay(gpu.stream()).unwrap();
    assert_eq!(gpu.download(&x).unwrap()[0], 512.0, "a failed recording harms no other");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn streams_wait_for_each_other_by_events() {
    let (gpu, scale) = function("scale");
    let n = 50_000_000;
    let x = gpu.upload(&vec![1.0f32; n]).unwrap();
    let other = gpu.new_stream().unwrap();
    let params = Params { x: x.address(), n: n as i32, factor: 2.0 };
    for (stream, before) in [(gpu.stream(), &other), (&other, gpu.stream()), (gpu.stream(), &other)] {
        let event = gpu.event().unwrap();
        event.record(before).unwrap();
        stream.wait(&event).unwrap();
        // SAFETY: `x` holds `n` floats until the download, and the streams take turns.
        unsafe { scale.launch(stream, grid(n), &params).unwrap() };
    }
    assert!(gpu.download(&x).unwrap().iter().all(|&x| x == 8.0));
}

#[test]
#[ignore = "needs an NVIDIA GPU from compute capability 9.0 on"]
fn clusters_and_tensor_maps_work() {
    let (gpu, rank) = function("rank");
    let x = gpu.upload(&[-1.0f32; 8]).unwrap();
    let clusters = Grid { blocks: [8, 1, 1], cluster: Some([4, 1, 1]), ..Grid::default() };
    // SAFETY: `x` holds eight floats until the download.
    unsafe { rank.launch(gpu.stream(), clusters, &Params { x: x.address(), n: 8, factor: 0.0 }).unwrap() };
    assert_eq!(gpu.download(&x).unwrap(), [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0]);

    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Tile {
        map: TensorMap,
        x: u64,
    }
    let (_, tile) = function("tile");
    let values: Vec<f32> = (0..5 * 64).map(|i| i as f32).collect();
    let tensor = gpu.upload(&values).unwrap();
    let map = Tiles {
        format: TileFormat::F32,
        address: tensor.address(),
        shape: &[64, 5],
        strides_bytes: &[256],
        tile: &[32, 4],
        swizzle: Swizzle::None,
    };
    let x = gpu.upload(&[f32::NAN; 128]).unwrap();
    let params = Tile { map: map.map().unwrap(), x: x.address() };
    // SAFETY: `x` holds as many floats as threads; both tensors live until the download.
    unsafe { tile.launch(gpu.stream(), Grid { threads: 128, ..Grid::default() }, &params).unwrap() };
    let expected: Vec<f32> = (0..128)
        .map(|i| (i % 32, i / 32))
        .map(|(column, row)| if 2 + row < 5 { values[(2 + row) * 64 + 32 + column] } else { 0.0 })
        .collect();
    assert_eq!(gpu.download(&x).unwrap(), expected);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_record_names_the_gpu_once_it_was_used() {
    let gpu = Gpu::shared().unwrap();
    module(gpu);
    let machine = Environment::detect().machine;
    assert_eq!(machine.gpu.as_deref(), Some(gpu.name.as_str()));
    assert!(machine.compute_capability.is_some() && machine.cuda.is_some() && machine.nvrtc.is_some(), "{machine:?}");
    assert!(machine.driver.is_some_and(|driver| driver.contains('.')));
}

/// What a first result costs, printed with `--nocapture`; alone in its process with `--exact`.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_first_result_comes_soon() {
    let start = Instant::now();
    let step = |what: &str| println!("{what} after {:.1} ms", start.elapsed().as_secs_f64() * 1e3);
    let gpu = Gpu::shared().unwrap();
    step("started the GPU");
    let scale = module(gpu).function("scale").unwrap();
    step("loaded the kernel");
    let x = gpu.upload(&[1.0f32; 256]).unwrap();
    step("uploaded");
    // SAFETY: `x` holds 256 floats until the download.
    unsafe { scale.launch(gpu.stream(), grid(256), &Params { x: x.address(), n: 256, factor: 2.0 }).unwrap() };
    assert_eq!(gpu.download(&x).unwrap(), [2.0; 256]);
    step("first result");
    assert!(start.elapsed().as_secs() < 5);
}
