use super::*;

/// A symbol: offset of the name, type with the binding in front, `st_other`.
fn symbol(name: u32, kind: u8, other: u8) -> Vec<u8> {
    let mut bytes = name.to_le_bytes().to_vec();
    bytes.extend([kind, other]);
    bytes.resize(SYMBOL_BYTES, 0);
    bytes
}

/// An attribute of the function with that symbol, with a value of 32 bits.
fn of_function(kind: u8, symbol: u32, value: u32) -> Vec<u8> {
    [&[FORM_LONG, kind, 8, 0][..], &symbol.to_le_bytes(), &value.to_le_bytes()].concat()
}

/// Name, contents, and the length that the header says where there are no contents.
type Section = (&'static str, Vec<u8>, usize);

/// An ELF image with these sections and one with their names behind them.
fn image(sections: &[Section]) -> Vec<u8> {
    let names: Vec<u8> = sections.iter().flat_map(|(name, ..)| [name.as_bytes(), b"\0"].concat()).collect();
    let all = sections.iter().cloned().chain([("", names, 0)]);
    let mut image = vec![0; 0x40];
    let (mut headers, mut name_at) = (Vec::new(), 0u32);
    for (name, contents, length) in all {
        let mut header = name_at.to_le_bytes().to_vec();
        header.resize(0x18, 0);
        header.extend((image.len() as u64).to_le_bytes());
        header.extend((contents.len().max(length) as u64).to_le_bytes());
        header.resize(0x40, 0);
        headers.extend(header);
        image.extend(contents);
        name_at += name.len() as u32 + 1;
    }
    let (table, count) = (image.len() as u64, sections.len() as u16 + 1);
    image[0x28..0x30].copy_from_slice(&table.to_le_bytes());
    for (at, value) in [(0x3a, 0x40), (0x3c, count), (0x3e, count - 1)] {
        image[at..at + 2].copy_from_slice(&u16::to_le_bytes(value));
    }
    image.extend(headers);
    image
}

/// Two kernels and a function that is none.
fn sections() -> Vec<Section> {
    const GLOBAL: u8 = 0x10;
    let symbols = [
        symbol(0, TYPE_FUNCTION, 0),
        symbol(7, GLOBAL | TYPE_FUNCTION, ENTRY_POINT),
        symbol(13, GLOBAL | TYPE_FUNCTION, ENTRY_POINT),
        symbol(7, 1, ENTRY_POINT),
    ];
    let attributes = [
        of_function(REGISTERS, 2, 168),
        of_function(STACK_BYTES, 1, 264),
        of_function(REGISTERS, 1, 32),
        of_function(REGISTERS, 0, 77),
    ];
    let of_sweep = [
        &[FORM_LONG, PARAMETER, 12, 0, 0, 0, 0, 0, 0, 0, 112, 0, 0, 0xf0, 65, 0][..],
        &[FORM_LONG, MAX_THREADS, 12, 0, 64, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0],
    ];
    vec![
        (".strtab", b"helper\0sweep\0gates\0".to_vec(), 0),
        (".symtab", symbols.concat(), 0),
        (".nv.info", attributes.concat(), 0),
        (".nv.info.sweep", of_sweep.concat(), 0),
        (".nv.shared.sweep", vec![], 1024 + 384),
        (".nv.shared.gates", vec![], 1024),
    ]
}

#[test]
fn kernels_are_known_without_a_word_of_the_compiler() {
    let mut sections = sections();
    sections.push((SYSTEM_SHARED, vec![], 0));
    let sweep = FunctionReport {
        name: "sweep".to_owned(),
        registers: 32,
        stack_bytes: 264,
        spills: None,
        shared_bytes: 384,
        parameter_bytes: 16,
        max_threads: Some(128),
    };
    let gates = FunctionReport { name: "gates".to_owned(), registers: 168, ..FunctionReport::default() };
    assert_eq!(kernels(&image(&sections)), [gates, sweep]);
}

#[test]
fn all_shared_memory_is_the_kernels_own_where_the_system_has_none() {
    let kernels = kernels(&image(&sections()));
    let shared: Vec<_> = kernels.iter().map(|kernel| (kernel.name.as_str(), kernel.shared_bytes)).collect();
    assert_eq!(shared, [("gates", 1024), ("sweep", 1408)]);
}

#[test]
fn an_image_that_is_none_has_no_kernels() {
    let whole = image(&sections());
    for length in 0..whole.len() - 0x40 {
        assert_eq!(kernels(&whole[..length]), [], "{length} bytes");
    }
    for bytes in [[0xff; 256], [0; 256]] {
        assert_eq!(kernels(&bytes), []);
    }
    // Whatever is damaged, it is no panic.
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] = 0xff;
        kernels(&damaged);
    }
}
