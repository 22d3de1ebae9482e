//! Options of commands that run somebody else's kernel, and implementations by their names.

use crate::output::note;
use gdnlab::Result;
use gdnlab::kernel::{Kernel, kernel};
use gdnlab::peer::{Peer, PeerOptions};
use std::path::PathBuf;

/// Where peers run.
#[derive(clap::Args)]
pub struct Python {
    /// Python that has the peer's packages; GDNLAB_PYTHON, or else python3, without it.
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
}

impl Python {
    /// As the person and the environment say.
    fn options(&self) -> Result<PeerOptions> {
        let options = PeerOptions::from_environment()?;
        Ok(PeerOptions { python: self.python.clone().unwrap_or(options.python), ..options })
    }

    /// As the person and the environment say, for the peer called `name`; says what a library takes its time for.
    pub fn options_for(&self, name: &str) -> Result<PeerOptions> {
        let options = self.options()?;
        if Peer::is_library(name) {
            note(format_args!(
                "{name} compiles and tunes in its first calls, on a fresh machine for minutes; an answer may take {} s \
                 (GDNLAB_PEER_TIMEOUT)",
                options.timeout.as_secs_f64()
            ));
        }
        Ok(options)
    }

    /// A kernel of this build, or a peer.
    pub fn kernel(&self, name: &str) -> Result<Box<dyn Kernel>> {
        if Peer::is_name(name) { Ok(Box::new(Peer::new(name, self.options_for(name)?)?)) } else { kernel(name) }
    }
}
