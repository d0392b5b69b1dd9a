//! Tests of records of every format, and of the errors about records without one.

use firebrick_data::{Fields, RecordFormat, RecordFormatError, RecordPlace, Row, Turn};
use serde_json::{Value as Json, json};

fn place() -> RecordPlace {
    RecordPlace { path: "rows.jsonl".into(), line: 7 }
}

fn parse_with(record: &Json, format: RecordFormat, names: &Fields) -> Result<Row, RecordFormatError> {
    let fields = record.as_object().unwrap();
    let mut names = names.clone();
    let format = format.resolve(fields, &mut names, &place())?;
    format.parse(fields, &names, &place())
}

fn parse(record: Json) -> Result<Row, RecordFormatError> {
    parse_with(&record, RecordFormat::Auto, &Fields::default())
}

fn chat(record: Json) -> (Vec<Turn>, Option<Vec<Json>>) {
    match parse(record).unwrap() {
        Row::Chat(chat) => (chat.turns, chat.tools),
        other => panic!("{other:?}"),
    }
}

fn texts(turns: &[Turn]) -> Vec<(&str, &str)> {
    turns.iter().map(|turn| (turn.role(), turn.content().unwrap_or("-"))).collect()
}

/// Returns a list of `record_formats.json`: rows of a record and words of the message, or records.
fn table(name: &str) -> Vec<Json> {
    let tables: Json = serde_json::from_str(include_str!("record_formats.json")).unwrap();
    tables[name].as_array().unwrap().clone()
}

fn refuses(record: Json, words: &[&str]) {
    let message = parse(record).unwrap_err().to_string();
    assert!(message.starts_with("rows.jsonl:7"), "{message}");
    assert!(words.iter().all(|word| message.contains(word)), "{message}");
}

#[test]
fn openai_messages_keep_their_keys_and_lose_nulls_and_flags() {
    let arguments = "{\"city\": \"Paris\", \"n\": 1}";
    let call = json!({ "id": "c1", "type": "function", "function": { "name": "f", "arguments": arguments } });
    let (turns, tools) = chat(json!({
        "tools": "[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]",
        "messages": [
            { "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }], "role": "user", "name": "x" },
            { "role": "assistant", "content": null, "tool_calls": [call], "weight": 0 },
            { "role": "tool", "tool_call_id": "c1", "content": "18", "train": true },
        ]
    }));
    assert_eq!(texts(&turns), [("user", "ab"), ("assistant", "-"), ("tool", "18")]);
    assert_eq!(turns.iter().map(|turn| turn.train).collect::<Vec<_>>(), [None, Some(false), Some(true)]);
    // The order of keys is the record's, because templates may print it.
    assert_eq!(turns[0].message.keys().collect::<Vec<_>>(), ["content", "role", "name"]);
    assert_eq!(turns[1].message.keys().collect::<Vec<_>>(), ["role", "tool_calls"]);
    assert_eq!(turns[1].message["tool_calls"][0]["function"]["arguments"], json!({ "city": "Paris", "n": 1 }));
    assert_eq!(tools.unwrap()[0]["function"]["name"], "f");
}

#[test]
fn sharegpt_roles_become_those_of_chat_templates() {
    let (turns, tools) = chat(json!({
        "system": "s",
        "tools": "",
        "conversations": [
            { "from": "human", "value": "q" },
            { "from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"x\": 1}}" },
            { "from": "observation", "value": "1" },
            { "from": "gpt", "value": "a" },
        ]
    }));
    assert_eq!(texts(&turns), [("system", "s"), ("user", "q"), ("assistant", "-"), ("tool", "1"), ("assistant", "a")]);
    assert_eq!(turns[2].message["tool_calls"][0]["function"], json!({ "name": "f", "arguments": { "x": 1 } }));
    assert_eq!(tools, None);
}

#[test]
fn alpaca_becomes_a_question_and_an_answer() {
    let (turns, _) = chat(json!({
        "instruction": "Translate.", "input": "chat", "output": "cat", "system": "s", "history": [["q", "a"]]
    }));
    let pairs =
        [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "Translate.\nchat"), ("assistant", "cat")];
    assert_eq!(texts(&turns), pairs);
    let (turns, _) = chat(json!({ "instruction": "Hi", "input": "", "output": "Ho" }));
    assert_eq!(texts(&turns), [("user", "Hi"), ("assistant", "Ho")]);
}

#[test]
fn texts_prompts_and_tokens_are_recognized() {
    assert_eq!(parse(json!({ "text": "t", "id": 3 })).unwrap(), Row::Text("t".to_owned()));
    let strings = parse(json!({ "prompt": "p", "completion": "c" })).unwrap();
    assert_eq!(strings, Row::PromptCompletion { prompt: "p".to_owned(), completion: "c".to_owned() });
    let lists = json!({
        "prompt": [{ "role": "user", "content": "p" }], "completion": [{ "role": "assistant", "content": "c" }]
    });
    let Row::Chat(chat) = parse(lists).unwrap() else { panic!("messages are a conversation") };
    assert_eq!((chat.turns.len(), chat.prompt_turns), (2, 1));
    let tokens = |record: Json| match parse(record).unwrap() {
        Row::Pretokenized { tokens, loss_mask } => (tokens, loss_mask),
        other => panic!("{other:?}"),
    };
    let labels = json!({ "input_ids": [0, 5, 6, 0], "labels": [-100, -100, 6, -100], "attention_mask": [0, 1, 1, 0] });
    assert_eq!(tokens(labels), (vec![5, 6], vec![false, true]));
    let mask = json!({ "input_ids": [5, 6], "completion_mask": [0, 1] });
    assert_eq!(tokens(mask), (vec![5, 6], vec![false, true]));
    assert_eq!(tokens(json!({ "input_ids": [5, 6] })), (vec![5, 6], vec![true, true]));
}

#[test]
fn keys_can_be_named() {
    let names = Fields {
        messages: Some("dialog".to_owned()),
        role: Some("who".to_owned()),
        content: Some("what".to_owned()),
        roles: [("Therapist".to_owned(), "assistant".to_owned())].into(),
        ..Fields::default()
    };
    let record = json!({ "dialog": [{ "who": "user", "what": "q" }, { "who": "Therapist", "what": "a" }] });
    let Row::Chat(chat) = parse_with(&record, RecordFormat::Auto, &names).unwrap() else { panic!("a conversation") };
    assert_eq!(texts(&chat.turns), [("user", "q"), ("assistant", "a")]);
    let named: Fields = serde_json::from_value(json!({ "text": "body" })).unwrap();
    let record = json!({ "body": "b", "messages": 3 });
    assert_eq!(parse_with(&record, RecordFormat::Text, &named).unwrap(), Row::Text("b".to_owned()));
    assert!(serde_json::from_value::<Fields>(json!({ "txt": "body" })).is_err());
}

#[test]
fn wrong_values_and_unknown_formats_are_named_with_their_place() {
    for row in table("refused") {
        let [record, words @ ..] = &row.as_array().unwrap()[..] else { panic!("{row}") };
        let words: Vec<&str> = words.iter().map(|word| word.as_str().unwrap()).collect();
        refuses(record.clone(), &words);
    }
}

#[test]
fn columns_of_media_are_refused_unless_they_are_empty() {
    let turns = json!([{ "role": "user", "content": "<image>q" }, { "role": "assistant", "content": "a" }]);
    let talk = json!([{ "from": "human", "value": "<image>\nq" }, { "from": "gpt", "value": "a" }]);
    let records = [
        json!({ "messages": turns }),
        json!({ "conversations": talk }),
        json!({ "instruction": "q", "output": "a" }),
        json!({ "prompt": "q", "completion": "a" }),
        json!({ "text": "t" }),
        json!({ "input_ids": [5, 6] }),
        json!({ "prompt": "q", "chosen": "a", "rejected": "b" }),
    ];
    for record in records {
        let format = if record.get("chosen").is_some() { RecordFormat::Preference } else { RecordFormat::Auto };
        let parsed = |key: &str, value: &Json| {
            let mut record = record.clone();
            record[key] = value.clone();
            parse_with(&record, format, &Fields::default())
        };
        for key in ["images", "audios", "videos", "image", "audio", "video"] {
            for value in [json!(["a.jpg"]), json!("000/a.jpg"), json!({ "bytes": "AA", "path": null })] {
                let error = parsed(key, &value).unwrap_err();
                let message = error.to_string();
                assert!(message.starts_with(&format!("rows.jsonl:7: {key} is not empty, but images")), "{message}");
                let hints = ["with columns = [...]", "with fields = {", "remove the rows"];
                let places = hints.map(|hint| message.find(hint).unwrap_or_else(|| panic!("{hint}: {message}")));
                assert!(places.is_sorted() && !error.is_bad_cell, "as a part of type image: {message}");
            }
            let empty = [json!([]), json!(""), Json::Null, json!([null]), json!({ "bytes": null, "path": null })];
            for value in empty.into_iter().chain([json!(false), json!(3)]) {
                assert!(parsed(key, &value).is_ok(), "{key} {value} in {record}");
            }
        }
    }
    let names = Fields { text: "video".to_owned(), ..Fields::default() };
    let transcript = parse_with(&json!({ "video": "what is said" }), RecordFormat::Text, &names).unwrap();
    assert_eq!(transcript, Row::Text("what is said".to_owned()));
}

#[test]
fn numbers_and_booleans_are_texts_where_a_text_is_expected() {
    assert_eq!(parse(json!({ "text": 3 })).unwrap(), Row::Text("3".to_owned()));
    for (record, question, answer) in [
        (json!({ "question": "i", "answer": 42 }), "i", "42"),
        (json!({ "instruction": 1, "input": 2.5, "output": true }), "1\n2.5", "true"),
        (json!({ "messages": [{ "role": "user", "content": 1 }, { "role": "assistant", "content": -2 }] }), "1", "-2"),
    ] {
        let (turns, _) = chat(record.clone());
        assert_eq!(texts(&turns), [("user", question), ("assistant", answer)], "{record}");
    }
    let pair = pair(&json!({ "prompt": "q", "chosen": 1, "rejected": 2 }));
    assert_eq!(pair.map(|(texts, _)| texts[0].1.clone()), ["1", "2"]);
}

#[test]
fn a_null_is_a_bad_cell_and_not_another_format() {
    let is_bad_cell = |record: Json, format| parse_with(&record, format, &Fields::default()).unwrap_err().is_bad_cell;
    for (rows, format) in [("bad_cells", RecordFormat::Auto), ("bad_cells_of_pairs", RecordFormat::Preference)] {
        for record in table(rows) {
            assert!(is_bad_cell(record.clone(), format), "{record}");
        }
    }
    assert!(!is_bad_cell(json!({ "messages": "hi" }), RecordFormat::Auto));
}

#[test]
fn null_keys_are_absent_but_not_in_strings() {
    let values = json!({ "a": null, "b": [1, null, { "c": null }] });
    let call = |arguments: Json| json!({ "function": { "name": "f", "arguments": arguments } });
    let (turns, tools) = chat(json!({
        "messages": null, "tools": [{ "name": "f", "parameters": values }],
        "conversations": [
            { "role": null, "from": "gpt", "content": null, "value": "x", "tool_calls": [call(values.clone())], "extra": values },
            { "from": "gpt", "value": null, "tool_calls": [call(values.to_string().into())] },
        ],
    }));
    let pruned = json!({ "b": [1, null, {}] });
    assert_eq!((turns[0].role(), turns[0].content()), ("assistant", Some("x")));
    assert_eq!(turns[0].message["tool_calls"], json!([call(pruned.clone())]));
    assert_eq!((&turns[0].message["extra"], &tools.unwrap()[0]["function"]["parameters"]), (&pruned, &pruned));
    assert_eq!(turns[1].message["tool_calls"], json!([call(values)]));
}

#[test]
fn the_loss_of_an_assistant_is_its_flag_and_of_others_a_key() {
    let (turns, _) = chat(json!({ "conversations": [
        { "from": "human", "value": "q", "loss": false }, { "from": "gpt", "value": "a", "loss": 0 },
        { "from": "gpt", "value": "b", "loss": true }, { "from": "gpt", "value": "c", "loss": null },
    ] }));
    let found: Vec<_> = turns.iter().map(|turn| (turn.train, turn.message.contains_key("loss"))).collect();
    assert_eq!(found, [(None, true), (Some(false), false), (Some(true), false), (None, false)]);
}

#[test]
fn what_is_no_format_of_records_is_named() {
    let turns = json!([{ "role": "user", "content": "q" }]);
    refuses(json!({ "instruction;output": "a;b" }), &["';' separates the columns here", "write the file with commas"]);
    refuses(json!({ "conversation": [{ "input": "a", "output": "b" }] }), &["xtuner's format", "\"messages\""]);
    refuses(json!({ "mine": { "file_name": "mine.json" } }), &["dataset_info.json", "name the data file itself"]);
    refuses(json!({ "architectures": ["A"], "model_type": "a" }), &["the configuration of a model"]);
    let message = parse_with(&json!({ "messages": turns }), RecordFormat::Alpaca, &Fields::default()).unwrap_err();
    let said = "data.format is \"alpaca\", and the rows are \"chat\": they have \"messages\". Remove data.format";
    assert!(message.to_string().contains(said) && !message.is_bad_cell, "{message}");
    assert!(parse_with(&json!({ "text": "a", "messages": turns }), RecordFormat::Text, &Fields::default()).is_ok());
}

#[test]
fn similar_keys_are_suggested_with_the_line_to_write() {
    let turns = json!([{ "role": "user", "content": "q" }]);
    for (record, line) in [
        (
            json!({ "Instruction": "q", "Response": "a" }),
            "fields = { instruction = \"Instruction\", output = \"Response\" }",
        ),
        (json!({ "Question": "q", "Answer": "a" }), "fields = { instruction = \"Question\", output = \"Answer\" }"),
        (
            json!({ "instruction": "q", "Context": "c", "solution": "a" }),
            "fields = { input = \"Context\", output = \"solution\" }",
        ),
        (json!({ "prompt": "q", "Completion": "a" }), "fields = { completion = \"Completion\" }"),
        (json!({ "Conversation": turns }), "fields = { messages = \"Conversation\" }"),
        (json!({ "id": 1, "content": "t" }), "fields = { text = \"content\" }"),
    ] {
        refuses(record.clone(), &[line]);
        let line: String = line.chars().skip_while(|&letter| letter != '{').collect();
        let names = line.trim_matches(['{', '}']).split(", ").map(|part| part.trim().split_once(" = ").unwrap());
        let names: Json = names.map(|(ours, theirs)| (ours.to_owned(), Json::from(theirs.trim_matches('"')))).collect();
        let names: Fields = serde_json::from_value(names).unwrap();
        assert!(parse_with(&record, RecordFormat::Auto, &names).is_ok(), "{record} is read with {line}");
    }
}

#[test]
fn common_pairs_of_columns_are_questions_and_answers() {
    let cases = [
        (json!({ "instruction": "q", "context": "", "response": "a" }), "q", "a"),
        (json!({ "instruction": "q", "context": "c", "response": "a", "category": "x" }), "q\nc", "a"),
        (json!({ "id": 3, "question": "q", "answer": "a" }), "q", "a"),
        (json!({ "prompt": "q", "response": "a" }), "q", "a"),
        (json!({ "input": "q", "output": "a" }), "q", "a"),
        (json!({ "query": "q", "response": "a" }), "q", "a"),
        (json!({ "instruction": "q", "input": "i", "output": "a" }), "q\ni", "a"),
    ];
    for (record, question, answer) in cases {
        let (turns, _) = chat(record.clone());
        assert_eq!(texts(&turns), [("user", question), ("assistant", answer)], "{record}");
    }
    // Names that the recipe gives are not replaced.
    let names = Fields { output: "solution".to_owned(), ..Fields::default() };
    assert!(parse_with(&json!({ "instruction": "q", "response": "a" }), RecordFormat::Auto, &names).is_err());
    assert!(matches!(parse(json!({ "prompt": "q", "completion": "a" })).unwrap(), Row::PromptCompletion { .. }));
}

#[test]
fn preference_data_needs_named_answers() {
    let turns = json!([{ "role": "user", "content": "q" }, { "role": "assistant", "content": "a" }]);
    let names = Fields { messages: Some("chosen".to_owned()), ..Fields::default() };
    let record = json!({ "chosen": turns, "rejected": turns });
    assert!(matches!(parse_with(&record, RecordFormat::Auto, &names).unwrap(), Row::Chat(_)));
    assert!(parse(json!({ "text": "a", "label": true })).is_ok(), "a text has no answer that could be bad");
    assert!(parse(json!({ "messages": turns, "score_rejected": 0.5 })).is_ok());
}

/// Returns both answers of a pair as conversations, with the number of messages before the answer.
fn pair(record: &Json) -> [(Vec<(String, String)>, usize); 2] {
    let Row::Pair { chosen, rejected } = parse_with(record, RecordFormat::Preference, &Fields::default()).unwrap()
    else {
        panic!("a pair was expected: {record}")
    };
    [chosen, rejected].map(|row| match *row {
        Row::Chat(chat) => {
            let text = |turn: &Turn| (turn.role().to_owned(), turn.content().unwrap_or_default().to_owned());
            (chat.turns.iter().map(text).collect(), chat.prompt_turns)
        }
        Row::PromptCompletion { prompt, completion } => (vec![(prompt, completion)], 0),
        other => panic!("{other:?}"),
    })
}

#[test]
fn pairs_of_every_shape_have_one_prompt_and_two_answers() {
    let user = json!({ "role": "user", "content": "q" });
    let answer = |text: &str| json!({ "role": "assistant", "content": text });
    let sharegpt = |from: &str, text: &str| json!({ "from": from, "value": text });
    let whole = |text: &str| json!([user, answer(text)]);
    let turns = [json!({ "role": "user", "content": "q" })];
    let chats = [
        json!({ "prompt": turns, "chosen": [answer("a")], "rejected": [answer("b")] }),
        json!({ "prompt": turns, "chosen": "a", "rejected": "b" }),
        json!({ "prompt": "q", "chosen": [answer("a")], "rejected": [answer("b")] }),
        json!({ "messages": turns, "chosen": answer("a"), "rejected": answer("b") }),
        json!({ "conversations": [sharegpt("human", "q")], "chosen": sharegpt("gpt", "a"), "rejected": sharegpt("gpt", "b") }),
        json!({ "instruction": "q", "input": "", "chosen": "a", "rejected": "b" }),
        json!({ "question": "q", "chosen": "a", "rejected": "b" }),
        json!({ "input": "q", "chosen_response": "a", "rejected_response": "b" }),
        json!({ "chosen": whole("a"), "rejected": whole("b") }),
        // As in ultrafeedback_binarized: prompt and messages repeat the content of the conversations.
        json!({ "prompt": "q", "messages": whole("a"), "chosen": whole("a"), "rejected": whole("b"), "score_chosen": 9.0 }),
    ];
    for record in chats {
        let expected = |text: &str| {
            let own = |role: &str, text: &str| (role.to_owned(), text.to_owned());
            (vec![own("user", "q"), own("assistant", text)], 1)
        };
        assert_eq!(pair(&record), [expected("a"), expected("b")], "{record}");
    }
    let text = |prompt: &str, answer: &str| (vec![(prompt.to_owned(), answer.to_owned())], 0);
    let texts = json!({ "prompt": "p ", "chosen": "a", "rejected": "b" });
    assert_eq!(pair(&texts), [text("p ", "a"), text("p ", "b")]);
    let implicit = json!({ "chosen": "Human: x Assistant: yes", "rejected": "Human: x Assistant: no" });
    assert_eq!(pair(&implicit), [text("Human: x Assistant:", " yes"), text("Human: x Assistant:", " no")]);
}

#[test]
fn a_mapped_prompt_makes_turns_of_a_pair_of_texts() {
    let names = Fields { instruction: "prompt".to_owned(), ..Fields::default() };
    let record = json!({ "prompt": "q", "chosen": "a", "rejected": "b" });
    let Row::Pair { chosen, rejected } = parse_with(&record, RecordFormat::Preference, &names).unwrap() else {
        panic!("a pair was expected")
    };
    for (row, answer) in [(chosen, "a"), (rejected, "b")] {
        let Row::Chat(chat) = *row else { panic!("a conversation was expected") };
        assert_eq!((texts(&chat.turns), chat.prompt_turns), (vec![("user", "q"), ("assistant", answer)], 1));
    }
    let record = json!({ "prompt": null, "chosen": "a 1", "rejected": "a 2" });
    assert!(parse_with(&record, RecordFormat::Preference, &names).unwrap_err().is_bad_cell);
}

#[test]
fn conversations_of_several_turns_share_what_they_begin_with() {
    let turn = |role: &str, text: &str| json!({ "role": role, "content": text });
    let common = [turn("system", "s"), turn("user", "q"), turn("assistant", "r"), turn("user", "again")];
    let whole = |text: &str| Json::Array([&common[..], &[turn("assistant", text)]].concat());
    let [(chosen, prompt), (rejected, same)] = pair(&json!({ "chosen": whole("a"), "rejected": whole("b") }));
    assert_eq!((chosen.len(), prompt, rejected.len(), same), (5, 4, 5, 4));
    let record = json!({ "system": "s", "instruction": "q", "history": [["x", "y"]], "chosen": "a", "rejected": "b" });
    let [(chosen, prompt), _] = pair(&record);
    assert_eq!((chosen.len(), prompt, chosen[0].1.as_str()), (5, 4, "s"));
}

#[test]
fn pairs_without_a_prompt_or_of_two_kinds_are_refused() {
    let refused =
        |record: Json| parse_with(&record, RecordFormat::Preference, &Fields::default()).unwrap_err().to_string();
    let message = refused(json!({ "chosen": "a", "rejected": "b" }));
    assert!(message.contains("there is no prompt"), "{message}");
    let answer = json!([{ "role": "assistant", "content": "a" }]);
    let message = refused(json!({ "prompt": "q", "chosen": answer, "rejected": "b" }));
    assert!(message.contains("rejected must be a list of messages, as the chosen answer is"), "{message}");
    let mut names = Fields::default();
    let record = json!({ "prompt": "q", "completion": "a", "label": true });
    let message =
        RecordFormat::Preference.resolve(record.as_object().unwrap(), &mut names, &place()).unwrap_err().to_string();
    assert!(message.contains("KTO"), "{message}");
}

#[test]
fn bare_function_schemas_are_wrapped_as_servers_wrap_them() {
    let turns = json!([{ "role": "user", "content": "q" }]);
    let bare = json!({ "name": "f", "description": "d", "parameters": {} });
    let wrapped = json!({ "type": "function", "function": bare });
    let (_, tools) = chat(json!({ "messages": turns, "tools": [bare, wrapped, { "type": "code", "name": "x" }] }));
    assert_eq!(tools.unwrap(), [wrapped.clone(), wrapped, json!({ "type": "code", "name": "x" })]);
}

#[test]
fn parts_become_what_templates_read() {
    let call = json!({ "name": "f", "arguments": { "x": 1 } });
    let part = |kind: &str, value: &str| json!({ "type": kind, "value": value });
    let parts = [part("reasoning", "r"), part("text", "a"), part("tool_call", &call.to_string())];
    let (turns, _) = chat(json!({ "messages": [{ "role": "assistant", "content": parts, "loss_weight": 0.0 }] }));
    let expected = json!({
        "role": "assistant", "content": "a", "reasoning_content": "r",
        "tool_calls": [{ "type": "function", "function": call }]
    });
    assert_eq!((Json::from(turns[0].message.clone()), turns[0].train), (expected, Some(false)));
}

#[test]
fn an_object_of_many_keys_gives_a_short_error() {
    let record: serde_json::Map<String, Json> =
        (0..7000).map(|id| (format!("row-{id}"), json!({ "text": "a" }))).collect();
    let message = parse(record.into()).unwrap_err().to_string();
    assert!(
        message.len() < 1200 && message.contains("6976 more keys") && message.contains("by their ids"),
        "{message}"
    );
}
