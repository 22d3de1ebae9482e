//! Every kernel file, in every specialisation, for every architecture.

use crate::{nvrtc, process, scale};
use gdnlab::cuda::{Architecture, Build, Cache, Compiled, FunctionReport, Source, Spills, operators, sources};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// A100, H100 and H200, B200, and the RTX 50 series, whose code GB10 (sm_121) runs too.
pub const ARCHITECTURES: &[&str] = &["sm_80", "sm_90a", "sm_100", "sm_120"];

/// What the tests compile, kept between runs of the tests.
fn cache() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("compiled-kernels")
}

/// Each specialisation of each operator with each architecture.
pub fn instances(architectures: &[&str]) -> Vec<(Build, Architecture)> {
    let architectures: Vec<Architecture> = architectures.iter().map(|name| name.parse().unwrap()).collect();
    let builds = operators().iter().flat_map(|operator| (operator.builds)().unwrap());
    builds.flat_map(|build| architectures.iter().map(move |&target| (build.clone(), target))).collect()
}

/// All instances compiled, by as many processes as there are processors.
fn compile_all() -> Vec<(String, Compiled)> {
    nvrtc::compiler();
    let count = std::thread::available_parallelism().unwrap().get();
    let share = |first| process::start(&format!("share {first} {count}"), &[("GDNLAB_CACHE", &cache())]);
    let children: Vec<_> = (0..count).map(share).collect();
    for child in children {
        let (success, text) = process::finish(child);
        assert!(success, "{text}");
    }
    let cache = Cache::at(cache());
    let compiled = |(build, architecture): (Build, Architecture)| {
        let compiled = build.compiled(architecture, &cache).unwrap_or_else(|error| panic!("{build}: {error}"));
        (format!("{build} {architecture}"), compiled)
    };
    instances(ARCHITECTURES).into_iter().map(compiled).collect()
}

/// What is wrong with a kernel, in the words of ptxas.
fn complaint(function: &FunctionReport) -> Option<String> {
    let FunctionReport { registers, stack_bytes, spills, .. } = function;
    let Some(Spills { store_bytes, load_bytes }) = spills else {
        return Some("the log says nothing about spills".to_owned());
    };
    (stack_bytes + store_bytes + load_bytes > 0).then(|| {
        format!(
            "{registers} registers, {stack_bytes} bytes of stack, \
             {store_bytes} bytes stored and {load_bytes} loaded for want of registers"
        )
    })
}

#[test]
fn every_kernel_compiles_for_every_architecture_without_spills_or_warnings() {
    let mut wrong = String::new();
    for (name, compiled) in compile_all() {
        for warning in &compiled.report.warnings {
            writeln!(wrong, "{name}: {warning}").unwrap();
        }
        for function in &compiled.report.functions {
            println!("{name}: {} has {} registers", function.name, function.registers);
            if let Some(complaint) = complaint(function) {
                writeln!(wrong, "{name}: {}: {complaint}", function.name).unwrap();
            }
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
}

#[test]
fn every_kernel_file_is_compiled_by_these_tests() {
    let compiled: BTreeSet<String> =
        instances(&["sm_80"]).into_iter().map(|(build, _)| build.source.name.replace(".cu", "")).collect();
    let files: BTreeSet<String> = sources().into_iter().map(str::to_owned).collect();
    assert_eq!(compiled, files, "each file in kernels/ stands in the list of its operator");
}

#[test]
fn structures_of_parameters_have_one_size_in_cuda_and_in_rust() {
    let cache = Cache::at(cache());
    nvrtc::compiler();
    for operator in operators() {
        let mut missing: BTreeSet<&str> = operator.parameters.iter().map(|(entry, _)| *entry).collect();
        for build in (operator.builds)().unwrap() {
            let compiled = build.compiled("sm_90a".parse().unwrap(), &cache).unwrap();
            for function in &compiled.report.functions {
                let rust = operator.parameters.iter().find(|(entry, _)| *entry == function.name);
                let bytes = rust.map(|(_, bytes)| *bytes as u32);
                assert_eq!(bytes, Some(function.parameter_bytes), "{} of {build}", function.name);
                missing.remove(function.name.as_str());
            }
        }
        assert!(missing.is_empty(), "{}: no build has {missing:?}", operator.name);
    }
}

/// What the checks above rest on: facts of kernels whose facts are known.
#[test]
fn the_report_knows_the_facts_of_a_kernel() {
    let compiler = nvrtc::compiler();
    let text = r#"
        struct Params { float* x; int n; };
        __device__ __noinline__ float called(float x) { return x * x; }
        extern "C" __global__ void stack(const __grid_constant__ Params p) {
            __shared__ float shared[96];
            float y[200];
            for (int i = 0; i < 200; i++) y[i] = p.x[i];
            shared[threadIdx.x] = y[p.n];
            __syncthreads();
            p.x[threadIdx.x] = shared[31 - threadIdx.x] + called(y[p.x[0] > 0 ? 1 : p.n + 1]);
        }
        extern "C" __global__ void __launch_bounds__(64, 2) fits(const __grid_constant__ Params p) {
            int unused;
            p.x[threadIdx.x] = 1;
        }"#;
    let build = Build { source: Source::new("facts.cu", text).unwrap(), defines: vec![] };
    for architecture in ARCHITECTURES.iter().chain(&["sm_121"]) {
        let compiled = build.compile(architecture.parse().unwrap(), &compiler).unwrap();
        assert!(compiled.cubin.starts_with(b"\x7fELF"), "{architecture}");
        let report = &compiled.report;
        assert_eq!(report.functions.len(), 2, "{architecture}");
        let stack = report.function("stack").unwrap();
        assert!(stack.stack_bytes >= 800 && complaint(stack).is_some(), "{architecture} {stack:?}");
        assert_eq!((stack.shared_bytes, stack.parameter_bytes, stack.max_threads), (384, 16, None), "{architecture}");
        for function in &report.functions {
            let said = format!("Used {} registers", function.registers);
            let (_, log) = compiled.log.split_once(&format!("entry function '{}'", function.name)).unwrap();
            assert_eq!(log.find(&said), log.find("Used "), "{architecture} {function:?}\n{}", compiled.log);
        }
        let fits = report.function("fits").unwrap();
        assert!(fits.registers > 0 && fits.stack_bytes == 0 && complaint(fits).is_none(), "{architecture} {fits:?}");
        assert_eq!((fits.shared_bytes, fits.parameter_bytes, fits.max_threads), (0, 16, Some(64)), "{architecture}");
        assert!(report.warnings.iter().any(|warning| warning.contains("unused")), "{:?}", report.warnings);
    }
}

#[test]
fn an_unknown_minor_architecture_runs_the_code_of_an_older_one() {
    let compiler = nvrtc::compiler();
    let build = Build { source: scale(), defines: vec![] };
    let compiled = build.compile("sm_129".parse().unwrap(), &compiler).unwrap();
    assert!(compiled.log.contains("for 'sm_121'"), "{}", compiled.log);
    let error = build.compile("sm_990".parse().unwrap(), &compiler).unwrap_err().to_string();
    assert!(error.contains("sm_120") && error.contains("GDNLAB_NVRTC"), "{error}");
    assert!("sm90".parse::<Architecture>().is_err() && "sm_9".parse::<Architecture>().is_err());
}

#[test]
fn a_refused_source_is_quoted_with_file_and_line() {
    let compiler = nvrtc::compiler();
    let source = Source::new("broken.cu", "#include \"common.cuh\"\n__global__ void f() { undeclared; }\n").unwrap();
    let build = Build { source, defines: vec![] };
    let error = build.compile("sm_80".parse().unwrap(), &compiler).unwrap_err().to_string();
    assert!(error.contains("broken.cu(2)") && error.contains("undeclared"), "{error}");
    let error = Source::new("a.cu", "#include \"no_such.cuh\"\n").unwrap_err().to_string();
    assert!(error.contains("no_such.cuh") && error.contains("common.cuh"), "{error}");
}
