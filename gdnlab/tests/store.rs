//! `cargo lab merge` with files on a web server and in an object store: a tiny server that speaks as much of both as is asked.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use gdnlab::inputs::Regime;
use gdnlab::numerics::{Problems, run};
use gdnlab::problem::Shape;
use gdnlab::record::{Record, parse, to_json_lines};
use gdnlab::{chunked::Chunked, precision::Policy};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

/// Objects by their paths, `/bucket/key`.
type Objects = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// Answers on a port of its own until the test ends.
fn serve(objects: &Objects) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let objects = objects.clone();
    std::thread::spawn(move || listener.incoming().for_each(|stream| answer(stream.unwrap(), &objects)));
    port
}

fn answer(stream: TcpStream, objects: &Objects) {
    let mut reader = BufReader::new(stream);
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        if line.trim().is_empty() {
            break;
        }
        head.push(line.trim().to_owned());
    }
    let header = |name: &str| {
        let lines = head.iter().filter_map(|line| line.split_once(": "));
        lines.filter(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned()).next()
    };
    let mut body = vec![0; header("content-length").map_or(0, |length| length.parse().unwrap())];
    reader.read_exact(&mut body).unwrap();
    let mut words = head[0].split(' ');
    let (method, target) = (words.next().unwrap(), words.next().unwrap());
    // What a client asks for has no spaces, and what a list shows has.
    let target = target.replace("%2F", "/").replace("%20", " ").replace('+', " ");
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let mut objects = objects.lock().unwrap();
    let (status, content) = match (method, objects.get(path)) {
        ("GET", _) if query.contains("list-type=2") => ("200 OK", listing(&objects, path, query).into_bytes()),
        ("GET", Some(found)) => ("200 OK", found.clone()),
        ("PUT", Some(_)) if header("if-none-match").is_some() => ("412 Precondition Failed", Vec::new()),
        ("PUT", _) => {
            objects.insert(path.to_owned(), body);
            ("200 OK", Vec::new())
        }
        _ => ("404 Not Found", Vec::new()),
    };
    let mut stream = reader.into_inner();
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n", content.len()).unwrap();
    write!(stream, "ETag: \"1\"\r\nLast-Modified: Mon, 30 Nov 2026 12:00:00 GMT\r\n\r\n").unwrap();
    stream.write_all(&content).unwrap();
}

/// The keys of a bucket that lie in the folder that is asked for, as S3 lists them.
fn listing(objects: &BTreeMap<String, Vec<u8>>, bucket: &str, query: &str) -> String {
    let prefix = query.split('&').find_map(|part| part.strip_prefix("prefix=")).unwrap_or_default();
    let bucket = format!("{}/", bucket.trim_end_matches('/'));
    let mut text = "<ListBucketResult><IsTruncated>false</IsTruncated>".to_owned();
    let keys = objects.iter().filter_map(|(path, content)| Some((path.strip_prefix(&bucket)?, content)));
    for (key, content) in keys.filter(|(key, _)| key.strip_prefix(prefix).is_some_and(|rest| !rest.contains('/'))) {
        let size = content.len();
        write!(text, "<Contents><Key>{key}</Key><LastModified>2026-11-30T12:00:00.000Z</LastModified>").unwrap();
        write!(text, "<ETag>\"1\"</ETag><Size>{size}</Size></Contents>").unwrap();
    }
    text + "</ListBucketResult>"
}

fn merge(port: u16, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
    command.arg("merge").args(arguments).env("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}"));
    command.envs([("AWS_ALLOW_HTTP", "true"), ("AWS_REGION", "us-east-1")]);
    command.envs([("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret"), ("NO_PROXY", "127.0.0.1")]);
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// A store with three parts of a sweep, the last line of one cut short, and the records that are whole.
fn store() -> (Objects, usize) {
    let shapes = vec![Shape::new(9, 1, 4, 4), Shape::new(17, 1, 4, 8), Shape::new(20, 1, 8, 4)];
    let problems = Problems { shapes, ..Problems::day1(&[Regime::MildDecay], 1) };
    let kernel = Chunked::new("cpu-chunk-fp32", Policy::preset("fp32").unwrap(), 64).unwrap();
    let records = run(&problems, &[&kernel], |_| ControlFlow::Continue(())).unwrap();
    let objects = Objects::default();
    for (part, records) in records.chunks(records.len() / 3).enumerate() {
        let mut lines = to_json_lines(records).unwrap();
        if part == 1 {
            lines.truncate(lines.len() - 40);
        }
        let name = format!("/bucket/a sweep/errors-part{}of4_cpu_2026-11-30.jsonl", part + 1);
        objects.lock().unwrap().insert(name, lines.into_bytes());
    }
    for other in ["notes.txt", "deeper/x.jsonl"] {
        objects.lock().unwrap().insert(format!("/bucket/a sweep/{other}"), b"no records".to_vec());
    }
    (objects, records.len())
}

fn records(content: &[u8]) -> Vec<Record> {
    parse(text(content), Path::new("a test")).unwrap()
}

#[test]
fn files_of_a_web_server_are_named_one_by_one() {
    let (objects, count) = store();
    let port = serve(&objects);
    let folder = tempfile::tempdir().unwrap();
    let one = folder.path().join("one.jsonl");
    let address = |part: &str| format!("http://127.0.0.1:{port}/bucket/a%20sweep/{part}");
    let parts = [1, 2, 3].map(|part| address(&format!("errors-part{part}of4_cpu_2026-11-30.jsonl")));
    let [first, second, third] = parts.each_ref().map(String::as_str);
    let merged = merge(port, &[first, second, third, "-o", one.to_str().unwrap()]);
    let said = text(&merged.stderr);
    assert_eq!(merged.status.code(), Some(0), "{said}");
    assert_eq!(records(&std::fs::read(&one).unwrap()).len(), count - 1);
    assert!(said.contains(&format!("{second}:8: skipped, as it was cut short")), "{said}");
    assert!(said.contains("part 4 of 4 of errors is not there"), "{said}");
    for (address, expected) in [
        (address("no.jsonl"), "no.jsonl"),
        (address("*.jsonl"), "a web server has no list"),
        (address(""), "a web server has no list"),
        (address("x.jsonl?key=1"), "not passed on"),
        ("nostore://bucket/x.jsonl".to_owned(), "such as s3://bucket/file.jsonl"),
        ("s3://bucket".to_owned(), "no file and no folder"),
        ("s3://bucket/*/x.jsonl".to_owned(), "a '*' in a folder"),
    ] {
        let refused = merge(port, &[&address, "-o", "never.jsonl"]);
        assert_eq!(refused.status.code(), Some(2), "{address}");
        assert!(text(&refused.stderr).contains(expected), "{address}: {}", text(&refused.stderr));
    }
    let refused = merge(port, &[first, "-o", &address("merged.jsonl")]);
    assert!(text(&refused.stderr).contains("a web server is read, not written: expected"), "{}", text(&refused.stderr));
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn parts_in_a_bucket_are_found_merged_and_written_once() {
    let (objects, count) = store();
    let port = serve(&objects);
    for from in ["s3://bucket/a sweep/errors-part*.jsonl", "s3://bucket/a%20sweep/"] {
        let to = format!("s3://bucket/merged{}.jsonl", from.len());
        let merged = merge(port, &[from, "-o", &to]);
        assert_eq!(merged.status.code(), Some(0), "{}", text(&merged.stderr));
        let path = to.replace("s3:/", "");
        let written = objects.lock().unwrap()[&path].clone();
        assert_eq!(records(&written).len(), count - 1);
        let again = merge(port, &[from, "-o", &to]);
        assert_eq!(again.status.code(), Some(2));
        assert!(text(&again.stderr).contains("exists already"), "{}", text(&again.stderr));
        assert_eq!(objects.lock().unwrap()[&path], written);
    }
    let none = merge(port, &["s3://bucket/no/such*.jsonl", "-o", "never.jsonl"]);
    assert!(text(&none.stderr).contains("expected files of records there, got none"), "{}", text(&none.stderr));
}
