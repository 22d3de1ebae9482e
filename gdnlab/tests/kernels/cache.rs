//! Compiled kernels on disk, with the compiler at work.

use crate::{nvrtc, process, scale};
use gdnlab::cuda::{Build, Cache, Compiled};
use std::path::{Path, PathBuf};
use std::time::Instant;

fn entries(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn compiled(build: &Build, architecture: &str, cache: &Cache) -> Compiled {
    build.compiled(architecture.parse().unwrap(), cache).unwrap()
}

#[test]
fn the_key_holds_all_that_the_code_depends_on() {
    nvrtc::compiler();
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let first = Build { source: scale(), defines: vec![("FACTOR", "2".to_owned())] };
    let mut text = first.clone();
    text.source.text.push_str("// another\n");
    let mut header = first.clone();
    header.source.headers[0].1.push_str("// another\n");
    let define = Build { defines: vec![("FACTOR", "3".to_owned())], ..first.clone() };
    for (count, build) in [first.clone(), text, header, define].iter().enumerate() {
        compiled(build, "sm_80", &cache);
        assert_eq!(entries(folder.path()).len(), count + 1, "{build}");
    }
    compiled(&first, "sm_90a", &cache);
    assert_eq!(entries(folder.path()).len(), 5);
    for architecture in ["sm_80", "sm_90a"] {
        let again = compiled(&first, architecture, &cache);
        assert!(again.log.contains(&format!("for '{architecture}'")), "{}", again.log);
    }
    assert_eq!(entries(folder.path()).len(), 5);
}

/// What comes from the cache is what the compiler made, and it comes in a moment.
#[test]
fn an_entry_is_as_good_as_compiling_and_faster() {
    let compiler = nvrtc::compiler();
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let build = Build { source: scale(), defines: vec![] };
    let made = compiled(&build, "sm_90a", &cache);
    let start = Instant::now();
    let read = compiled(&build, "sm_90a", &cache);
    let reading = start.elapsed();
    assert_eq!(made, read);
    let start = Instant::now();
    build.compile("sm_90a".parse().unwrap(), &compiler).unwrap();
    let compiling = start.elapsed();
    println!("reading {reading:?}, compiling {compiling:?}");
    assert!(reading * 2 < compiling, "reading {reading:?}, compiling {compiling:?}");
}

#[test]
fn a_damaged_entry_is_made_anew() {
    nvrtc::compiler();
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let build = Build { source: scale(), defines: vec![] };
    let made = compiled(&build, "sm_80", &cache);
    let path = entries(folder.path()).pop().unwrap();
    let whole = std::fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for damaged in [&flipped[..], &whole[..whole.len() - 1], b""] {
        std::fs::write(&path, damaged).unwrap();
        assert_eq!(compiled(&build, "sm_80", &cache), made);
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        assert_eq!(entries(folder.path()).len(), 1);
    }
}

#[test]
fn two_processes_may_fill_one_cache_at_once() {
    nvrtc::compiler();
    let folder = tempfile::tempdir().unwrap();
    let children = [(); 2].map(|()| process::start("many 6", &[("GDNLAB_CACHE", folder.path())]));
    for child in children {
        let (success, text) = process::finish(child);
        assert!(success, "{text}");
    }
    assert_eq!(entries(folder.path()).len(), 6, "{:?}", entries(folder.path()));
    let whole = |path: &PathBuf| std::fs::read(path).unwrap();
    let before: Vec<_> = entries(folder.path()).iter().map(whole).collect();
    for factor in 0..6 {
        let build = Build { source: scale(), defines: vec![("FACTOR", format!("{factor}"))] };
        compiled(&build, "sm_80", &Cache::at(folder.path()));
    }
    assert_eq!(entries(folder.path()).iter().map(whole).collect::<Vec<_>>(), before);
}

#[test]
fn a_missing_compiler_is_said_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let said = |nvrtc: &Path| {
        let child = process::start("fail", &[("GDNLAB_NVRTC", nvrtc), ("GDNLAB_CACHE", folder.path())]);
        let (success, text) = process::finish(child);
        assert!(success, "{text}");
        text.lines().find_map(|line| line.split_once("said: ")).unwrap().1.to_owned()
    };
    let message = said(Path::new("/no/such/folder"));
    assert!(message.contains("GDNLAB_NVRTC=/no/such/folder") && message.contains("libnvrtc.so.13"), "{message}");
    let no_library = folder.path().join("libnvrtc.so.13");
    std::fs::write(&no_library, "not a library").unwrap();
    for path in [&no_library, &folder.path().to_path_buf()] {
        let message = said(path);
        assert!(message.contains("not an NVRTC") && message.contains("pip install nvidia-cuda-nvrtc"), "{message}");
    }
}
