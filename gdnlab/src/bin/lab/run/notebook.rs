//! A Jupyter notebook file: reading, filling in outputs, and writing it in one normal form.
//!
//! The normal form makes a re-run a small diff: keys are sorted, cells are numbered from 1, text is split into lines,
//! and whatever differs from run to run without being a result (times, editor state) is left out.

use gdnlab::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// A notebook of format 4 whose language is Rust.
pub struct Notebook {
    path: PathBuf,
    document: Value,
}

impl Notebook {
    /// # Errors
    /// [`Error::Input`] where `path` is not a Rust notebook, [`Error::Io`] where it cannot be read.
    pub fn load(path: &Path) -> Result<Self> {
        let complaint = |text: String| Error::input(format!("{}: {text}", path.display()));
        if path.is_dir() {
            return Err(complaint("expected a notebook (.ipynb), this is a folder".to_owned()));
        }
        let text = std::fs::read_to_string(path).map_err(|source| Error::io(path, source))?;
        let document: Value = serde_json::from_str(&text)
            .map_err(|error| complaint(format!("expected a notebook, this is not JSON ({error})")))?;
        if document["nbformat"].as_u64() != Some(4) {
            return Err(complaint("expected a notebook of format 4 (`nbformat`: 4)".to_owned()));
        }
        let cells = document["cells"].as_array().ok_or_else(|| complaint("expected a list of `cells`".to_owned()))?;
        if cells.iter().any(|cell| cell["cell_type"].as_str().is_none() || text_of(&cell["source"]).is_none()) {
            return Err(complaint("a cell lacks its `cell_type` or its `source`".to_owned()));
        }
        if let Some(kernel) = document["metadata"]["kernelspec"]["name"].as_str()
            && kernel != super::KERNEL
        {
            return Err(complaint(format!("expected a notebook for the kernel `{}`, not `{kernel}`", super::KERNEL)));
        }
        Ok(Self { path: path.to_path_buf(), document })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Positions of the code cells that hold code, in the order in which they run.
    pub fn code_cells(&self) -> Vec<usize> {
        let is_code = |cell: &Value| {
            cell["cell_type"] == "code" && text_of(&cell["source"]).is_some_and(|source| !source.trim().is_empty())
        };
        let cells = self.document["cells"].as_array();
        cells.map_or_else(Vec::new, |cells| (0..cells.len()).filter(|&index| is_code(&cells[index])).collect())
    }

    pub fn source(&self, cell: usize) -> String {
        text_of(&self.document["cells"][cell]["source"]).unwrap_or_default()
    }

    pub fn outputs(&self, cell: usize) -> &[Value] {
        self.document["cells"][cell]["outputs"].as_array().map_or(&[], Vec::as_slice)
    }

    /// Whether the cell carries Jupyter's tag for a cell that is meant to fail.
    pub fn may_fail(&self, cell: usize) -> bool {
        let tags = self.document["cells"][cell]["metadata"]["tags"].as_array();
        tags.is_some_and(|tags| tags.iter().any(|tag| tag == "raises-exception"))
    }

    pub fn set_outputs(&mut self, cell: usize, outputs: Vec<Value>) {
        self.document["cells"][cell]["outputs"] = Value::Array(outputs);
    }

    /// Writes the notebook in its normal form, as a whole or not at all.
    pub fn save(&mut self) -> Result<()> {
        self.normalise();
        let partial = self.path.with_extension("ipynb.partial");
        std::fs::write(&partial, self.to_text()).map_err(|source| Error::io(&partial, source))?;
        std::fs::rename(&partial, &self.path).map_err(|source| Error::io(&self.path, source))
    }

    fn normalise(&mut self) {
        let mut number = 0;
        if let Some(cells) = self.document["cells"].as_array_mut() {
            for (index, cell) in cells.iter_mut().enumerate() {
                normalise_cell(cell, index, &mut number);
            }
        }
        self.document["metadata"] = json!({
            "kernelspec": {"display_name": "Rust", "language": "rust", "name": super::KERNEL},
            "language_info": {
                "codemirror_mode": "rust", "file_extension": ".rs", "mimetype": "text/rust",
                "name": "Rust", "pygment_lexer": "rust", "version": "",
            },
        });
        self.document["nbformat_minor"] = json!(5);
    }

    fn to_text(&self) -> Vec<u8> {
        let mut text = Vec::new();
        let formatter = serde_json::ser::PrettyFormatter::with_indent(b" ");
        let mut serializer = serde_json::Serializer::with_formatter(&mut text, formatter);
        // Writing a JSON value into memory has no way to fail.
        let _ = serde::Serialize::serialize(&sorted(&self.document), &mut serializer);
        text.push(b'\n');
        text
    }
}

fn normalise_cell(cell: &mut Value, index: usize, number: &mut u64) {
    if cell["id"].as_str().is_none_or(str::is_empty) {
        cell["id"] = json!(format!("cell-{index}"));
    }
    let source = text_of(&cell["source"]).unwrap_or_default();
    cell["source"] = lines(source.trim_end());
    let tags = cell["metadata"]["tags"].take();
    cell["metadata"] = if tags.is_null() { json!({}) } else { json!({ "tags": tags }) };
    if cell["cell_type"] != "code" {
        return;
    }
    if source.trim().is_empty() {
        cell["execution_count"] = Value::Null;
        cell["outputs"] = json!([]);
        return;
    }
    *number += 1;
    cell["execution_count"] = json!(*number);
    if let Some(outputs) = cell["outputs"].as_array_mut() {
        outputs.iter_mut().for_each(|output| normalise_output(output, *number));
    }
}

fn normalise_output(output: &mut Value, number: u64) {
    if output.get("execution_count").is_some() {
        output["execution_count"] = json!(number);
    }
    if let Some(text) = output.get("text").and_then(text_of) {
        output["text"] = lines(&text);
    }
    if let Some(data) = output.get_mut("data").and_then(Value::as_object_mut) {
        for (mime, content) in data.iter_mut() {
            let is_text = mime.starts_with("text/") || mime == "image/svg+xml";
            if let Some(text) = text_of(content) {
                *content = if is_text { lines(&text) } else { Value::String(text.trim_end().to_owned()) };
            }
        }
    }
}

/// The text of a notebook's field, which is one string or a list of lines.
pub fn text_of(field: &Value) -> Option<String> {
    match field {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts.iter().map(Value::as_str).collect::<Option<String>>(),
        _ => None,
    }
}

fn lines(text: &str) -> Value {
    Value::Array(text.split_inclusive('\n').map(|line| Value::String(line.to_owned())).collect())
}

/// The same value with the keys of every object in order.
fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let mut names: Vec<&String> = fields.keys().collect();
            names.sort();
            Value::Object(names.into_iter().map(|name| (name.clone(), sorted(&fields[name]))).collect::<Map<_, _>>())
        }
        Value::Array(items) => Value::Array(items.iter().map(sorted).collect()),
        other => other.clone(),
    }
}

#[cfg(test)]
#[path = "notebook_tests.rs"]
mod tests;
