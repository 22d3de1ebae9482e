//! The language models of the ladder.

pub mod config;
