//! Checkpoints: a training in one safetensors file, from which it goes on to the same bits.
//!
//! | in the file | holds |
//! |---|---|
//! | `NAME` | the parameter called NAME, f64 |
//! | `adamw.m.NAME`, `adamw.v.NAME` | its moments, f64 |
//! | metadata `checkpoint` | version of this layout |
//! | metadata `config`, `settings` | the model's sizes and [`Settings`](super::train::Settings) as JSON |
//! | metadata `steps`, `text` | steps taken, and the fingerprint of the text |
//! | metadata `gpu` | of a training on a GPU: what its bits depend on beside all this |

use super::adamw::Moments;
use super::config::ModelConfig;
use super::parameters::Parameters;
use super::step::Model;
use super::train::Training;
use crate::peer::file::{self, complaint};
use crate::peer::{Destination, Stored};
use crate::precision::Format;
use crate::{Error, Result};
use safetensors::{Dtype, SafeTensors};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::path::Path;

/// Version of the layout.
const VERSION: &str = "1";

/// What stands before the names of the parameters themselves, of the first moments, and of the second.
const PREFIXES: [&str; 3] = ["", "adamw.m.", "adamw.v."];

impl Training {
    /// Writes the training to `destination`: the file is there in full or not at all.
    ///
    /// # Errors
    /// [`Error::Io`] where it cannot be written.
    pub fn save(&self, destination: &Destination) -> Result<()> {
        self.save_with(destination, &[])
    }

    /// The same with `more` entries of metadata.
    pub(super) fn save_with(&self, destination: &Destination, more: &[(&str, &str)]) -> Result<()> {
        let json = |value: Result<String, serde_json::Error>| {
            value.map_err(|error| complaint(destination.path(), format!("cannot be written: {error}")))
        };
        let (config, settings) = (json(to_json(self.model.config()))?, json(to_json(&self.settings))?);
        let steps = self.moments.steps.to_string();
        let sets = PREFIXES.iter().zip([&self.model.parameters, &self.moments.m, &self.moments.v]);
        let named: Vec<_> = sets
            .flat_map(|(prefix, set)| set.iter().map(move |(name, tensor)| (format!("{prefix}{name}"), tensor)))
            .collect();
        let stored = named.iter().map(|(name, tensor)| Stored::values(name, tensor, Format::F64)).collect();
        let mut metadata = vec![
            ("checkpoint", VERSION),
            ("config", &config),
            ("settings", &settings),
            ("steps", &steps),
            ("text", &self.text),
        ];
        metadata.extend(more);
        destination.write(stored, &metadata)
    }

    /// The training that [`Training::save`] wrote to `path`.
    ///
    /// # Errors
    /// [`Error::Io`] where the file cannot be read; [`Error::Input`], with the path, where it is no
    /// checkpoint, or a part of it is missing or not valid.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Ok(Self::load_with_metadata(path.as_ref())?.0)
    }

    /// The same with all metadata.
    pub(super) fn load_with_metadata(path: &Path) -> Result<(Self, HashMap<String, String>)> {
        let bytes = file::read_bytes(path)?;
        let (tensors, metadata) = file::parse(path, &bytes)?;
        let reader = Reader { path, tensors, metadata };
        let training = reader.training().map_err(|error| complaint(path, error))?;
        Ok((training, reader.metadata))
    }
}

fn to_json(value: &impl Serialize) -> Result<String, serde_json::Error> {
    serde_json::to_string(value)
}

/// The parts of a checkpoint. What it complains of has no path yet.
struct Reader<'a> {
    path: &'a Path,
    tensors: SafeTensors<'a>,
    metadata: HashMap<String, String>,
}

impl Reader<'_> {
    fn training(&self) -> Result<Training> {
        let version = self.metadata.get("checkpoint").map(String::as_str);
        if version != Some(VERSION) {
            let version = version.unwrap_or("none").escape_debug();
            return Err(Error::input(format!("expected a checkpoint of version {VERSION}, got {version}")));
        }
        let config: ModelConfig = self.json("config")?;
        config.validate()?;
        if config.layers > self.tensors.len() {
            let held = self.tensors.len();
            return Err(Error::input(format!(
                "holds {held} tensors for {config}: truncated, or not its own metadata?"
            )));
        }
        let settings: super::train::Settings = self.json("settings")?;
        settings.validate()?;
        let steps: u64 = self.json("steps")?;
        if steps > settings.schedule.steps {
            return Err(Error::input(format!("{steps} of {} steps taken: expected fewer", settings.schedule.steps)));
        }
        let [parameters, m, v] = PREFIXES.map(|prefix| self.parameters(&config, prefix));
        let (parameters, m, v) = (parameters?, m?, v?);
        m.validate(&config)?;
        v.validate(&config)?;
        if let Some((name, _)) = v.iter().find(|(_, tensor)| tensor.data.iter().any(|&x| x < 0.0)) {
            return Err(Error::input(format!("the second moment of '{name}' is below 0: expected a mean of squares")));
        }
        Ok(Training {
            model: Model::from_parameters(config, parameters)?,
            moments: Moments { m, v, steps },
            settings,
            text: self.entry("text")?.to_owned(),
        })
    }

    fn parameters(&self, config: &ModelConfig, prefix: &str) -> Result<Parameters> {
        Parameters::try_from_fn(config, |name| {
            let name = format!("{prefix}{name}");
            let view = self.tensors.tensor(&name).map_err(|_| Error::input(format!("has no tensor '{name}'")))?;
            if view.dtype() != Dtype::F64 {
                return Err(Error::input(format!("tensor '{name}' has dtype {:?}: expected f64", view.dtype())));
            }
            file::decode(self.path, &name, &view)
        })
    }

    fn json<T: DeserializeOwned>(&self, key: &str) -> Result<T> {
        serde_json::from_str(self.entry(key)?).map_err(|error| Error::input(format!("metadata {key}: {error}")))
    }

    fn entry(&self, key: &str) -> Result<&str> {
        let entry = self.metadata.get(key).map(String::as_str);
        entry.ok_or_else(|| Error::input(format!("has no metadata entry '{key}'")))
    }
}

#[cfg(test)]
#[path = "checkpoint_tests.rs"]
mod tests;
