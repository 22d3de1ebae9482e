use super::*;
use serde_json::json;

fn stdout(text: &str) -> Value {
    json!({"output_type": "stream", "name": "stdout", "text": text})
}

fn stderr(text: &str) -> Value {
    json!({"output_type": "stream", "name": "stderr", "text": text})
}

fn value(text: &str) -> Value {
    json!({"output_type": "execute_result", "data": {"text/plain": text}, "execution_count": 2, "metadata": {}})
}

fn fault_of(source: &str, outputs: &[Value], reached_end: bool) -> Option<String> {
    fault(&Outcome { source, outputs, reached_end, showed_before: false })
}

#[test]
fn the_end_of_a_cell_is_read_past_comments() {
    assert_eq!(ending("let a = 1;"), Ending::Statement);
    assert_eq!(ending("let a = 1; // one\n\n// done\n"), Ending::Statement);
    assert_eq!(ending("let url = \"https://a.b\";"), Ending::Statement);
    assert_eq!(ending("fn f() {\n}"), Ending::Block);
    assert_eq!(ending("let a = 1;\na"), Ending::Expression);
    assert_eq!(ending("table.show() // figure 1"), Ending::Expression);
    assert_eq!(ending(":dep rand = \"0.10\""), Ending::Other);
    assert_eq!(ending("// nothing"), Ending::Other);
}

#[test]
fn the_end_mark_is_sent_after_statements_and_taken_out_of_the_output() {
    let sent = with_end_mark("println!(\"a\");");
    assert!(sent.starts_with("println!(\"a\");\n") && sent.contains(END_MARK));
    assert_eq!(with_end_mark("1 + 1"), "1 + 1");
    let mut outputs = vec![stdout(&format!("a\n{END_MARK}\n"))];
    assert!(take_end_mark(&mut outputs));
    assert_eq!(outputs, [stdout("a\n")]);
    let mut outputs = vec![stdout(&format!("{END_MARK}\n"))];
    assert!(take_end_mark(&mut outputs));
    assert!(outputs.is_empty());
    assert!(!take_end_mark(&mut vec![stdout("a\n")]));
}

#[test]
fn cells_that_did_their_work_pass() {
    assert_eq!(fault_of("let a = 1;", &[], true), None);
    assert_eq!(fault_of("1 + 1", &[value("2")], false), None);
    assert_eq!(fault_of("fn f() {}", &[], false), None);
    assert_eq!(fault_of("show(&table)", &[stderr("drawing\n"), stdout("t\n")], false), None);
    assert_eq!(fault_of("let text = \"thread 'a' panicked at b\";", &[], true), None);
}

#[test]
fn a_compile_error_is_reported_without_colours() {
    let error = json!({"output_type": "error", "ename": "Error", "evalue": "x", "traceback": ["\u{1b}[31mE0425\u{1b}[0m", "y"]});
    assert_eq!(fault_of("x", &[error], false).unwrap(), "E0425\ny");
}

#[test]
fn a_panic_is_found_on_standard_error() {
    let message = "thread '<unnamed>' (12) panicked at src/lib.rs:9:5:\nboom\nnote: run with";
    let fault = fault_of("go();", &[stderr(message)], false).unwrap();
    assert!(fault.contains("panicked at") && fault.ends_with("boom"), "{fault}");
}

#[test]
fn an_err_is_found_as_value_and_after_a_question_mark() {
    assert_eq!(fault_of("read()", &[value("Err(Missing)")], false).unwrap(), "returned Err(Missing)");
    let early = fault_of("read()?;", &[stderr("no such file\n")], false).unwrap();
    assert_eq!(early, "stopped before its end: no such file");
    for source in ["read()?", "for _ in 0..2 {\n    read()?;\n}"] {
        let early = fault_of(source, &[stderr("no such file\n")], false).unwrap();
        assert_eq!(early, "stopped before its end: no such file");
    }
}

#[test]
fn a_missing_output_is_a_fault_where_one_is_due() {
    assert!(fault_of("table", &[], false).unwrap().contains("showed nothing"));
    assert!(fault_of("drop(table)", &[value("()")], false).unwrap().contains("close it with `;`"));
    let outcome = Outcome { source: "if a { b }", outputs: &[], reached_end: false, showed_before: true };
    assert!(fault(&outcome).unwrap().contains("it did before"));
}
