//! Files of records in object stores: S3, Google Cloud Storage, Azure, and those of web servers.
//!
//! Credentials come from the environment, by the names that each store's own tools give them (`AWS_ACCESS_KEY_ID`,
//! `AWS_ENDPOINT_URL`, `GOOGLE_SERVICE_ACCOUNT`, `AZURE_STORAGE_ACCOUNT_NAME` and so on), or from the machine's role.

use gdnlab::record::Source;
use gdnlab::{Error, Result};
use glob::Pattern;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{
    ClientOptions, ObjectStore, ObjectStoreExt, ObjectStoreScheme, PutMode, PutOptions, PutPayload, RetryConfig,
};
use std::sync::Arc;
use std::time::Duration;
use url::{Position, Url};

/// Files that are fetched at once.
const AT_ONCE: usize = 16;
/// For how long a store that does not answer is asked again.
const PATIENCE: Duration = Duration::from_secs(20);

/// Where machines in a cloud ask for the credentials of their role.
const ROLES: &str = "169.254.169.254";

/// A place in a store.
struct Place {
    store: Arc<dyn ObjectStore>,
    /// The address without the part behind its last `/`.
    folder: String,
    /// All of it as the store names it.
    path: Path,
    /// The part behind it.
    last: String,
    /// Whether the store tells what it holds.
    lists: bool,
}

/// Whether `text` is the address of a store, and no path.
pub fn is_address(text: &str) -> bool {
    text.contains("://") && !text.starts_with("file://")
}

/// The files at `address`: one, all `*.jsonl` where it ends in `/`, or those that its last part fits where that has a `*`.
///
/// # Errors
/// [`Error::Input`] where the address is none, the store refuses or does not answer, or no file is there.
pub fn sources(address: &str) -> Result<Vec<Source>> {
    let place = Place::of(address)?;
    let complaint = |error| refused(address, &error);
    let runtime = runtime()?;
    let paths = if place.last.is_empty() || place.last.contains('*') {
        if !place.lists {
            return Err(Error::input(format!("{address}: a web server has no list of its files: name each of them")));
        }
        runtime.block_on(place.matching()).map_err(complaint)?
    } else {
        vec![place.path.clone()]
    };
    if paths.is_empty() {
        return Err(Error::input(format!("{address}: expected files of records there, got none")));
    }
    let mut sources = Vec::with_capacity(paths.len());
    for some in paths.chunks(AT_ONCE) {
        let texts = runtime.block_on(place.fetch(some)).map_err(complaint)?;
        for (path, text) in some.iter().zip(texts) {
            let name = path.filename().unwrap_or_default();
            sources.push(Source::new(format!("{}{name}", place.folder), &text)?);
        }
    }
    Ok(sources)
}

/// Writes `text` as a new file at `address`.
///
/// # Errors
/// [`Error::Input`] where a file is there, and as [`sources`].
pub fn write(address: &str, text: String) -> Result<()> {
    let place = Place::of(address)?;
    if !place.lists {
        return Err(Error::input(format!(
            "{address}: a web server is read, not written: expected a path, or an address such as s3://bucket/file.jsonl, \
             gs://bucket/file.jsonl or az://container/file.jsonl"
        )));
    }
    let new = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
    let put = place.store.put_opts(&place.path, PutPayload::from(text), new);
    match runtime()?.block_on(put) {
        Ok(_) => Ok(()),
        Err(object_store::Error::AlreadyExists { .. }) => Err(Error::input(format!(
            "{address}: exists already, and records are never edited afterwards: choose another name"
        ))),
        Err(error) => Err(refused(address, &error)),
    }
}

/// What a store answered, in one line.
fn refused(address: &str, error: &object_store::Error) -> Error {
    let text = error.to_string();
    let said = text.lines().next().unwrap_or_default();
    let hint = match error {
        object_store::Error::NotFound { .. } => "; there is no such file",
        _ if text.contains(ROLES) => {
            "; the environment holds no credentials, such as AWS_ACCESS_KEY_ID (or, for what is public, AWS_SKIP_SIGNATURE=true), \
             and this machine has no role in the cloud"
        }
        _ => "",
    };
    Error::input(format!("{address}: {said}{hint}"))
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    let built = tokio::runtime::Builder::new_current_thread().enable_all().build();
    built.map_err(|error| Error::io("the network", error))
}

impl Place {
    fn of(address: &str) -> Result<Self> {
        let expected = |what: String| {
            Error::input(format!(
                "{address}: {what}: expected a path, or an address such as s3://bucket/file.jsonl, gs://bucket/folder/, \
                 az://container/part*.jsonl or https://host/file.jsonl"
            ))
        };
        let url = Url::parse(address).map_err(|error| expected(error.to_string()))?;
        if url.query().is_some() || url.fragment().is_some() {
            return Err(expected("what follows '?' or '#' is not passed on".to_owned()));
        }
        if url.path().is_empty() {
            return Err(expected("no file and no folder".to_owned()));
        }
        let (scheme, path) = ObjectStoreScheme::parse(&url).map_err(|error| expected(error.to_string()))?;
        let lists = scheme != ObjectStoreScheme::Http;
        let store = store(scheme, &url).map_err(|error| refused(address, &error))?;
        let at = address.rfind('/').map_or(0, |slash| slash + 1);
        let (folder, last) = (address[..at].to_owned(), address[at..].to_owned());
        let Some(store) = store else { return Err(expected("no such store".to_owned())) };
        if folder.contains('*') {
            return Err(expected("a '*' in a folder".to_owned()));
        }
        Ok(Self { store: Arc::from(store), folder, path, last, lists })
    }

    /// The files in the folder that fit.
    async fn matching(&self) -> object_store::Result<Vec<Path>> {
        let pattern = if self.last.is_empty() { "*.jsonl" } else { &self.last };
        let pattern = Pattern::new(pattern)
            .map_err(|error| object_store::Error::Generic { store: "pattern", source: Box::new(error) })?;
        let folder = if self.last.is_empty() { Some(self.path.clone()) } else { self.path.parent() };
        let listed = self.store.list_with_delimiter(folder.as_ref()).await?;
        let paths = listed.objects.into_iter().map(|object| object.location);
        let mut paths: Vec<Path> =
            paths.filter(|path| path.filename().is_some_and(|name| pattern.matches(name))).collect();
        paths.sort();
        Ok(paths)
    }

    /// The contents of files, fetched at once.
    async fn fetch(&self, paths: &[Path]) -> object_store::Result<Vec<Vec<u8>>> {
        let fetch = |path: &Path| {
            let (store, path) = (self.store.clone(), path.clone());
            tokio::spawn(async move { Ok::<_, object_store::Error>(store.get(&path).await?.bytes().await?.to_vec()) })
        };
        let tasks: Vec<_> = paths.iter().map(fetch).collect();
        let mut texts = Vec::with_capacity(tasks.len());
        for task in tasks {
            texts.push(task.await??);
        }
        Ok(texts)
    }
}

/// The client of the store of `url`, where it is one of another machine.
fn store(scheme: ObjectStoreScheme, url: &Url) -> object_store::Result<Option<Box<dyn ObjectStore>>> {
    let retry = RetryConfig { retry_timeout: PATIENCE, ..RetryConfig::default() };
    Ok(Some(match scheme {
        ObjectStoreScheme::AmazonS3 => {
            Box::new(AmazonS3Builder::from_env().with_url(url.as_str()).with_retry(retry).build()?)
        }
        ObjectStoreScheme::GoogleCloudStorage => {
            Box::new(GoogleCloudStorageBuilder::from_env().with_url(url.as_str()).with_retry(retry).build()?)
        }
        ObjectStoreScheme::MicrosoftAzure => {
            Box::new(MicrosoftAzureBuilder::from_env().with_url(url.as_str()).with_retry(retry).build()?)
        }
        ObjectStoreScheme::Http => {
            // Who writes http:// asks for it.
            let options = ClientOptions::new().with_allow_http(url.scheme() == "http");
            let host = &url[..Position::BeforePath];
            Box::new(HttpBuilder::new().with_url(host).with_client_options(options).with_retry(retry).build()?)
        }
        _ => return Ok(None),
    }))
}
