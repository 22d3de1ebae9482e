use super::*;

fn compiled(bytes: usize) -> Compiled {
    Compiled { cubin: vec![7; bytes], log: "a log".to_owned(), report: Report::default(), compiler: "13.0".to_owned() }
}

fn key(text: &str) -> Key {
    let mut key = Key::new("recurrent.cu");
    key.add(text);
    key
}

/// Names of the entries, sorted.
fn entries(cache: &Cache) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(cache.folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn an_entry_is_found_again_under_its_key_alone() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path().join("new"));
    assert_eq!(cache.read(&key("a")), None);
    cache.write(&key("a"), &compiled(100));
    assert_eq!(cache.read(&key("a")), Some(compiled(100)));
    assert_eq!(cache.read(&key("b")), None);
    assert!(entries(&cache)[0].starts_with("recurrent-"));
}

#[test]
fn texts_that_are_joined_alike_are_different_keys() {
    let mut one = key("a");
    one.add("bc");
    let mut other = key("ab");
    other.add("c");
    assert_ne!(one.file_name(), other.file_name());
    assert_ne!(Key::new("chunk.cu").file_name(), Key::new("decode.cu").file_name());
}

#[test]
fn damage_is_noticed_wherever_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    cache.write(&key("a"), &compiled(100));
    let path = folder.path().join(key("a").file_name());
    let whole = std::fs::read(&path).unwrap();
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x20;
        std::fs::write(&path, &damaged).unwrap();
        assert_eq!(cache.read(&key("a")), None, "byte {at} of {}", whole.len());
        std::fs::write(&path, &whole[..at]).unwrap();
        assert_eq!(cache.read(&key("a")), None, "cut at {at} of {}", whole.len());
    }
    cache.write(&key("a"), &compiled(100));
    assert_eq!(cache.read(&key("a")), Some(compiled(100)));
}

#[test]
fn what_was_not_used_for_longest_goes_first() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path()).with_bound(3000);
    let hours_ago = |hours: u64| SystemTime::now() - Duration::from_secs(3600 * hours);
    for (name, hours) in [("a", 30), ("b", 20), ("c", 10)] {
        cache.write(&key(name), &compiled(800));
        let file = std::fs::File::open(folder.path().join(key(name).file_name())).unwrap();
        file.set_modified(hours_ago(hours)).unwrap();
    }
    assert!(cache.read(&key("a")).is_some());
    cache.write(&key("d"), &compiled(800));
    let kept: Vec<bool> = ["a", "b", "c", "d"].iter().map(|name| cache.read(&key(name)).is_some()).collect();
    assert_eq!(kept, [true, false, true, true]);
    // One that is larger than the whole cache is kept until the next.
    cache.write(&key("e"), &compiled(5000));
    assert_eq!(entries(&cache).len(), 1);
    assert!(cache.read(&key("e")).is_some());
}

#[test]
fn leftovers_of_killed_processes_go_and_those_of_running_ones_stay() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (folder.path().join(".tmp1.partial"), folder.path().join(".tmp2.partial"));
    std::fs::write(&old, "x").unwrap();
    std::fs::File::open(&old).unwrap().set_modified(SystemTime::now() - 2 * ABANDONED).unwrap();
    std::fs::write(&new, "x").unwrap();
    Cache::at(folder.path()).write(&key("a"), &compiled(10));
    assert!(!old.exists() && new.exists());
}

#[test]
fn a_cache_that_cannot_be_written_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let cache = Cache::at(&file);
    cache.write(&key("a"), &compiled(10));
    assert_eq!(cache.read(&key("a")), None);
}
