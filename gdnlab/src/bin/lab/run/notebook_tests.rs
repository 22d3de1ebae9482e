use super::*;

fn written(document: &Value) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.ipynb");
    std::fs::write(&path, document.to_string()).unwrap();
    Notebook::load(&path).unwrap().save().unwrap();
    assert!(!folder.path().join("a.ipynb.partial").exists());
    std::fs::read_to_string(path).unwrap()
}

fn sample(time: &str, count: u64) -> Value {
    json!({
        "nbformat": 4, "nbformat_minor": 4,
        "metadata": {"kernelspec": {"name": "rust", "display_name": "Rust"}, "toc": {"x": time}},
        "cells": [
            {"cell_type": "markdown", "metadata": {}, "source": "# Title\ntext\n"},
            {"cell_type": "code", "metadata": {"execution": {"iopub.status.busy": time}, "tags": ["a"]},
             "execution_count": count, "source": ["1 +", "1\n"],
             "outputs": [{"output_type": "execute_result", "execution_count": count, "metadata": {},
                          "data": {"text/plain": "2\n3", "image/png": "iVBO\n"}}]},
            {"cell_type": "code", "metadata": {}, "execution_count": null, "source": "", "outputs": []},
        ]
    })
}

#[test]
fn two_runs_that_differ_in_times_and_counts_alone_are_written_alike() {
    assert_eq!(written(&sample("10:00", 4)), written(&sample("11:30", 7)));
}

#[test]
fn the_normal_form_is_stable_and_has_sorted_keys_and_lines() {
    let text = written(&sample("10:00", 4));
    let document: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(written(&document), text);
    assert!(
        text.starts_with("{\n \"cells\": [\n  {\n   \"cell_type\": \"markdown\",\n   \"id\": \"cell-0\""),
        "{text}"
    );
    assert_eq!(document["cells"][0]["source"], json!(["# Title\n", "text"]));
    assert_eq!(document["cells"][1]["metadata"], json!({"tags": ["a"]}));
    assert_eq!(document["cells"][1]["execution_count"], 1);
    assert_eq!(document["cells"][1]["outputs"][0]["data"]["text/plain"], json!(["2\n", "3"]));
    assert_eq!(document["cells"][1]["outputs"][0]["data"]["image/png"], "iVBO");
    assert_eq!(document["cells"][2]["execution_count"], Value::Null);
}

#[test]
fn code_cells_without_code_do_not_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.ipynb");
    std::fs::write(&path, sample("", 1).to_string()).unwrap();
    assert_eq!(Notebook::load(&path).unwrap().code_cells(), [1]);
}

#[test]
fn what_is_not_a_rust_notebook_is_refused_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.ipynb");
    let complaint = |text: &str| {
        std::fs::write(&path, text).unwrap();
        Notebook::load(&path).err().unwrap().to_string()
    };
    assert!(complaint("").contains("not JSON"));
    assert!(complaint("{}").contains("format 4"));
    assert!(complaint(r#"{"nbformat": 4}"#).contains("`cells`"));
    assert!(complaint(r#"{"nbformat": 4, "cells": [{"cell_type": "code"}]}"#).contains("`source`"));
    let python = r#"{"nbformat": 4, "cells": [], "metadata": {"kernelspec": {"name": "python3"}}}"#;
    assert!(complaint(python).contains("`python3`"));
    assert!(Notebook::load(folder.path()).err().unwrap().to_string().contains("folder"));
    assert!(Notebook::load(&folder.path().join("none.ipynb")).is_err());
}
