use super::*;

fn library(since: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["core", "alloc", "std"] {
        std::fs::create_dir_all(folder.path().join(name).join("src")).unwrap();
        std::fs::write(folder.path().join(name).join("src/lib.rs"), "").unwrap();
    }
    let text = format!(
        "#[stable(feature = \"rust1\", since = \"1.0.0\")]\n#[rustc_const_stable(feature = \"b\", since = \"{since}\")]\n"
    );
    std::fs::create_dir_all(folder.path().join("core/src/num")).unwrap();
    std::fs::write(folder.path().join("core/src/num/mod.rs"), text).unwrap();
    std::fs::create_dir_all(folder.path().join("std/src/prelude")).unwrap();
    std::fs::write(folder.path().join(PRELUDE), "pub use core::prelude::v1::{include_str, line, matches};").unwrap();
    folder
}

#[test]
fn a_source_of_about_the_same_version_fits() {
    assert_eq!(unfit(library("1.95.0").path(), 95), None);
    assert_eq!(unfit(library("1.96.0").path(), 95), None);
    assert_eq!(unfit(library("1.85.0").path(), 95), None);
}

#[test]
fn a_source_without_macros_in_its_prelude_does_not_fit() {
    let folder = library("1.85.0");
    std::fs::write(folder.path().join(PRELUDE), "pub use core::prelude::v1::{include_str, line};").unwrap();
    assert!(unfit(folder.path(), 95).unwrap().contains("prelude has no `matches!`"));
}

#[test]
fn an_ancient_source_does_not_fit() {
    assert_eq!(unfit(library("1.63.0").path(), 95).unwrap(), "it is the source of Rust 1.63, too old for 1.95");
}

#[test]
fn a_half_made_source_does_not_fit() {
    let folder = library("1.95.0");
    std::fs::remove_dir_all(folder.path().join("alloc")).unwrap();
    assert_eq!(unfit(folder.path(), 95).unwrap(), "no alloc/src/lib.rs in it");
    assert!(unfit(Path::new("/nonexistent"), 95).is_some());
}

#[test]
fn a_source_without_versions_does_not_fit() {
    let folder = library("1.95.0");
    std::fs::write(folder.path().join("core/src/num/mod.rs"), "").unwrap();
    assert!(unfit(folder.path(), 95).unwrap().contains("does not tell"));
}
