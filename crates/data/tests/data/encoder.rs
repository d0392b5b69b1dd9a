//! Tests from records to examples: masks, lengths, dropped records with reasons, and the choice of the template.

use firebrick_data::{
    Batch, Chat, DataError, Diagnosis, DocumentSet, EncodeOptions, Encoded, Encoder, Fields, FindingCount, FindingKind,
    IGNORE_INDEX, OverflowPolicy, PackOptions, PackedDataset, PairRows, Record, RecordFormat, RecordPlace,
    TemplateChoice, TemplateDefaults, Tokenizer, TrainOn,
};
use serde_json::{Value as Json, json};

use crate::TEMPLATE;

fn tokenizer(template: Option<&str>) -> Tokenizer {
    crate::tokenizer("byte_level", template, &crate::config())
}

fn place(line: usize) -> RecordPlace {
    RecordPlace { path: "rows.jsonl".into(), line }
}

fn record(fields: &Json) -> Record {
    Record::new(fields.as_object().unwrap().clone(), place(1))
}

fn encode(tokenizer: &Tokenizer, options: &EncodeOptions, record: &Json) -> Result<Encoded, DataError> {
    let record = self::record(record);
    Encoder::new(tokenizer, options.clone(), &record)?.encode(&record)
}

/// Returns the text of the loss tokens of each example; each run of other tokens is a dot.
fn loss_text(tokenizer: &Tokenizer, encoded: &Encoded) -> Vec<String> {
    let shown = |example: &firebrick_data::Example| {
        let pairs: Vec<_> = example.tokens.iter().zip(&example.loss_mask).collect();
        let runs = pairs.chunk_by(|left, right| left.1 == right.1).map(|run| {
            let ids: Vec<u32> = run.iter().map(|(id, _)| **id).collect();
            if *run[0].1 { tokenizer.decode(&ids, false).unwrap() } else { ".".to_owned() }
        });
        runs.collect()
    };
    encoded.examples.iter().map(shown).collect()
}

/// Encodes a record and returns its [`loss_text`].
fn trained(tokenizer: &Tokenizer, options: &EncodeOptions, record: &Json) -> Vec<String> {
    loss_text(tokenizer, &encode(tokenizer, options, record).unwrap())
}

fn messages(turns: &[(&str, &str)]) -> Json {
    turns.iter().map(|(role, content)| json!({ "role": role, "content": content })).collect()
}

fn chat(turns: &[(&str, &str)]) -> Json {
    json!({ "messages": messages(turns) })
}

/// Encodes records and counts what is found in them.
fn diagnosed(tokenizer: &Tokenizer, options: &EncodeOptions, records: impl Iterator<Item = Json>) -> Diagnosis {
    let mut diagnosis = Diagnosis::default();
    for (index, record) in records.enumerate() {
        diagnosis.add(&encode(tokenizer, options, &record).unwrap(), &place(index + 1));
    }
    diagnosis
}

fn kinds(encoded: &Encoded) -> Vec<FindingKind> {
    encoded.findings.iter().map(|finding| finding.kind).collect()
}

#[test]
fn the_completion_counts_and_its_prompt_does_not() {
    let plain = tokenizer(None);
    let mut options = EncodeOptions::new(100);
    let prompt = messages(&[("user", "q"), ("assistant", "a1"), ("user", "r")]);
    let record = json!({ "prompt": prompt, "completion": messages(&[("assistant", "a2")]) });
    assert_eq!(trained(&tokenizer(Some(TEMPLATE)), &options, &record), [".a2</s>."]);
    let record = json!({ "prompt": "What is the capital?", "completion": " Paris" });
    assert_eq!(trained(&plain, &options, &record), [". Paris</s>"]);
    options.train_on = TrainOn::All;
    assert_eq!(trained(&plain, &options, &record), [".What is the capital? Paris</s>"]);
}

fn pair_options(max_seq_len: usize) -> EncodeOptions {
    EncodeOptions { record_format: RecordFormat::Preference, ..EncodeOptions::new(max_seq_len) }
}

#[test]
fn a_pair_gives_two_examples_in_which_the_answers_alone_count() {
    let tokenizer = tokenizer(Some(TEMPLATE));
    let prompt = messages(&[("user", "q"), ("assistant", "a1"), ("user", "r")]);
    let (chosen, rejected) = (messages(&[("assistant", "good")]), messages(&[("assistant", "bad")]));
    let record = json!({ "prompt": prompt, "chosen": chosen, "rejected": rejected });
    let encoded = encode(&tokenizer, &pair_options(200), &record).unwrap();
    assert_eq!(loss_text(&tokenizer, &encoded), [".good</s>.", ".bad</s>."]);
    assert!(encoded.is_chat && encoded.end_trained && encoded.findings.is_empty());
    let texts = json!({ "prompt": "What is it?", "chosen": " this", "rejected": " that" });
    assert_eq!(trained(&tokenizer, &pair_options(200), &texts), [". this</s>", ". that</s>"]);
    // A prompt that the recipe maps to the instruction is rendered with the template.
    let fields = Fields { instruction: "prompt".to_owned(), ..Fields::default() };
    let mapped = json!({ "prompt": "What is it?", "chosen": "this", "rejected": "that" });
    let encoded = encode(&tokenizer, &EncodeOptions { fields, ..pair_options(200) }, &mapped).unwrap();
    assert_eq!(loss_text(&tokenizer, &encoded), [".this</s>.", ".that</s>."]);
    assert!(encoded.is_chat && encoded.end_trained);
    let same = json!({ "prompt": "q", "chosen": "a", "rejected": "a" });
    let encoded = encode(&tokenizer, &pair_options(200), &same).unwrap();
    assert_eq!((kinds(&encoded), encoded.examples.len()), (vec![FindingKind::SameAnswers], 0));
}

/// Uses a template that writes a line break after the token that ends the answer; no loss counts it.
#[test]
fn cross_entropy_of_a_pair_adds_only_its_prompt() {
    let tokenizer = tokenizer(Some(TEMPLATE));
    let (chosen, rejected) = (messages(&[("assistant", "good")]), messages(&[("assistant", "bad")]));
    let record = json!({ "prompt": messages(&[("user", "q")]), "chosen": chosen, "rejected": rejected });
    let encoded = encode(&tokenizer, &pair_options(200), &record).unwrap();
    let rows = |pairs| {
        let options = PackOptions { pairs: Some(pairs), ..PackOptions::new(200) };
        PackedDataset::new(DocumentSet::from_examples(&encoded.examples), options).batch(&[0])
    };
    let (preference, both) = (rows(PairRows { prompt_loss: false }), rows(PairRows { prompt_loss: true }));
    let counts = |batch: &Batch| batch.targets.iter().map(|&target| target != IGNORE_INDEX).collect::<Vec<_>>();
    assert_eq!(both.pairs.as_ref().unwrap().is_answer, Some(counts(&preference)));
    let first = counts(&preference).iter().position(|&counts| counts).unwrap();
    let expected: Vec<bool> =
        counts(&preference).into_iter().enumerate().map(|(token, counts)| counts || token < first).collect();
    assert_eq!(counts(&both), expected);
    let chosen = both.cu_seqlens[1] as usize;
    assert_eq!(tokenizer.decode(&both.input_ids[chosen - 1..chosen], false).unwrap(), "\n");
    assert_eq!(both.targets[chosen - 2..chosen], [IGNORE_INDEX; 2]);
}

#[test]
fn a_long_pair_loses_the_beginning_of_its_prompt() {
    let tokenizer = tokenizer(None);
    let record = json!({ "prompt": "x".repeat(50), "chosen": "good", "rejected": "bad" });
    let whole = encode(&tokenizer, &pair_options(500), &record).unwrap();
    let tokens = |encoded: &Encoded| encoded.examples.iter().map(|example| example.tokens.len()).sum::<usize>();
    let limit = tokens(&whole) - 20;
    let cut = encode(&tokenizer, &pair_options(limit), &record).unwrap();
    assert_eq!((kinds(&cut), cut.tokens_cut, tokens(&cut)), (vec![FindingKind::PromptCut], 20, limit));
    assert_eq!(loss_text(&tokenizer, &cut), loss_text(&tokenizer, &whole));
    let both = encode(&tokenizer, &pair_options(8), &record).unwrap();
    assert_eq!(kinds(&both), [FindingKind::PromptCut, FindingKind::Truncated]);
    let drop = EncodeOptions { overflow: Some(OverflowPolicy::Drop), ..pair_options(limit) };
    assert_eq!(kinds(&encode(&tokenizer, &drop, &record).unwrap()), [FindingKind::TooLong]);
}

#[test]
fn alpaca_needs_no_template() {
    let record = json!({ "instruction": "Add.", "input": "1 2", "output": "3" });
    let options = EncodeOptions::new(100);
    for template in [None, Some(TEMPLATE)] {
        let tokenizer = tokenizer(template);
        let encoded = encode(&tokenizer, &options, &record).unwrap();
        assert!(loss_text(&tokenizer, &encoded)[0].starts_with(".3</s>"));
        let text = tokenizer.decode(&encoded.examples[0].tokens, false).unwrap();
        assert_eq!(text.contains("### Response:"), template.is_none(), "{text}");
        assert!(text.starts_with("<s>") && !text.starts_with("<s><s>"), "{text}");
    }
}

#[test]
fn alpacas_own_prompt_is_the_same_whatever_the_template() {
    let options = EncodeOptions { record_format: RecordFormat::AlpacaPrompt, ..EncodeOptions::new(1000) };
    let cases = [
        (
            json!({ "instruction": "Add.", "input": "1 2", "output": "3" }),
            "<s>Below is an instruction that describes a task, paired with an input that provides further context. Write a response \
             that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3</s>",
        ),
        (
            json!({ "question": "Hi", "input": "", "answer": "3" }),
            "<s>Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n\
             ### Instruction:\nHi\n\n### Response:\n3</s>",
        ),
    ];
    for (record, expected) in cases {
        for template in [None, Some(TEMPLATE)] {
            let tokenizer = tokenizer(template);
            let encoded = encode(&tokenizer, &options, &record).unwrap();
            assert_eq!(tokenizer.decode(&encoded.examples[0].tokens, false).unwrap(), expected);
            assert_eq!(loss_text(&tokenizer, &encoded), [".3</s>"]);
        }
    }
}

#[test]
fn pretokenized_records_are_checked_and_unchanged() {
    let tokenizer = tokenizer(None);
    let options = EncodeOptions::new(100);
    let encoded = encode(&tokenizer, &options, &json!({ "input_ids": [7, 8, 9], "labels": [7, -100, 9] })).unwrap();
    assert_eq!(
        (encoded.examples[0].tokens.as_slice(), encoded.examples[0].loss_mask.as_slice()),
        ([7, 8, 9].as_slice(), [false, false, true].as_slice())
    );
    let error = encode(&tokenizer, &options, &json!({ "input_ids": [7, 99_999] })).unwrap_err().to_string();
    assert!(
        error.contains("rows.jsonl:1") && error.contains("99999") && error.contains("another tokenizer"),
        "{error}"
    );
    let nothing = encode(&tokenizer, &options, &json!({ "input_ids": [7, 8], "labels": [7, -100] })).unwrap();
    assert_eq!((nothing.examples.len(), kinds(&nothing)), (0, vec![FindingKind::NothingToTrain]));
}

#[test]
fn overflow_is_cut_split_or_dropped_as_configured_and_counted() {
    let tokenizer = tokenizer(Some(TEMPLATE));
    let record = json!({ "text": "the quick brown fox jumps over the lazy dog" });
    let whole = encode(&tokenizer, &EncodeOptions::new(1000), &record).unwrap();
    let tokens = &whole.examples[0].tokens;
    let with = |overflow| {
        let options = EncodeOptions { overflow: Some(overflow), ..EncodeOptions::new(5) };
        encode(&tokenizer, &options, &record).unwrap()
    };
    let cut = with(OverflowPolicy::Truncate);
    assert_eq!((cut.examples[0].tokens.as_slice(), cut.tokens_cut), (&tokens[..5], tokens.len() - 5));
    assert_eq!(kinds(&cut), [FindingKind::Truncated]);
    let dropped = with(OverflowPolicy::Drop);
    assert_eq!((dropped.examples.len(), dropped.tokens_cut), (0, tokens.len()));
    let split = with(OverflowPolicy::Split);
    // Every token but the first of the document is a target exactly once.
    let targets: Vec<u32> = split.examples.iter().flat_map(|piece| piece.tokens[1..].to_vec()).collect();
    assert_eq!(targets, tokens[1..]);
    assert!(
        split.examples.iter().all(|piece| piece.tokens.len() <= 5 && piece.loss_mask[1..].iter().all(|&counts| counts))
    );
    assert_eq!((split.tokens_cut, kinds(&split)), (0, vec![FindingKind::Split]));
}

#[test]
fn each_problem_has_its_kind_of_finding() {
    let tokenizer = tokenizer(Some(TEMPLATE));
    let options = EncodeOptions::new(40);
    let found = |record: &Json| kinds(&encode(&tokenizer, &options, record).unwrap());
    let long = "x".repeat(99);
    assert_eq!(found(&chat(&[])), [FindingKind::Empty]);
    assert_eq!(found(&chat(&[("user", "q")])), [FindingKind::NothingToTrain]);
    assert_eq!(found(&chat(&[("user", &long), ("assistant", "a")])), [FindingKind::CutToNothing]);
    assert_eq!(found(&chat(&[("user", "q"), ("assistant", &long)])), [FindingKind::Truncated]);
    assert_eq!(found(&chat(&[("user", "q"), ("assistant", "a")])), []);
    let with = |template: &str| {
        let tokenizer = self::tokenizer(Some(template));
        let record = chat(&[("system", "Be kind."), ("user", "q"), ("assistant", "a")]);
        let encoded = encode(&tokenizer, &EncodeOptions::new(99), &record).unwrap();
        (kinds(&encoded), encoded.examples.len())
    };
    let doubled = TEMPLATE.replace("{{ bos_token }}", "{{ bos_token * 2 }}");
    assert_eq!(with(&doubled), (vec![FindingKind::DoubledBos], 0));
    let silent =
        TEMPLATE.replace("{% for message in messages %}", "{% for message in messages if message.role != 'system' %}");
    assert_eq!(with(&silent), (vec![FindingKind::MessageIgnored], 1));
    assert_eq!(with("{{ raise_exception('no') }}"), (vec![FindingKind::TemplateRefused], 0));
    let all = "{% generation %}{% for message in messages %}{{ message.content }}{% endfor %}{{ eos_token }}{% endgeneration %}";
    assert_eq!(with(all), (vec![FindingKind::AllTrained], 1));
}

#[test]
fn a_demand_for_ids_of_nine_characters_is_explained() {
    let tokenizer = tokenizer(Some(include_str!("../golden/templates/mistral_tools.jinja")));
    let encoded = |id: Option<&str>| {
        let mut record = chat(&[("user", "q"), ("assistant", ""), ("tool", "4"), ("assistant", "a")]);
        let mut call = json!({ "type": "function", "function": { "name": "f", "arguments": {} } });
        if let Some(id) = id {
            call["id"] = id.into();
            record["messages"][2]["tool_call_id"] = id.into();
        }
        record["messages"][1]["tool_calls"] = json!([call]);
        encode(&tokenizer, &EncodeOptions::new(999), &record).unwrap()
    };
    assert_eq!((kinds(&encoded(Some("aB3dE6gH9"))), encoded(Some("aB3dE6gH9")).examples.len()), (vec![], 1));
    for id in [None, Some("call_abc123"), Some("")] {
        let refused = encoded(id);
        assert_eq!(kinds(&refused), [FindingKind::TemplateRefused], "{id:?}");
        let detail = &refused.findings[0].detail;
        assert!(detail.contains("nine letters or digits") && detail.contains("`tool_call_id`"), "{detail}");
    }
    let no_user = encode(&tokenizer, &EncodeOptions::new(999), &chat(&[("x", "q"), ("assistant", "a")])).unwrap();
    assert!(!no_user.findings[0].detail.contains("nine letters"), "{:?}", no_user.findings);
}

#[test]
fn diagnosis_counts_records_and_keeps_the_first_places() {
    let tokenizer = tokenizer(Some(TEMPLATE));
    let record = |row| chat(if row % 4 == 0 { &[("user", "q")] } else { &[("user", "q"), ("assistant", "a")] });
    let diagnosis = diagnosed(&tokenizer, &EncodeOptions::new(40), (0..40).map(record));
    assert_eq!((diagnosis.rows, diagnosis.rows_kept, diagnosis.bad_rows, diagnosis.chats_ended), (40, 30, 10, 30));
    let report = diagnosis.to_string();
    assert!(report.contains("10 records dropped, nothing to train; first rows.jsonl:1: "), "{report}");
    assert!(report.contains("(then at 5, 9, 13, 17)"), "{report}");
}

#[test]
fn more_than_a_fifth_lost_to_the_length_is_a_warning() {
    let lost = |rows: u64, tokens_cut: u64, rows_kept: u64| {
        let dropped = FindingCount { count: rows, ..FindingCount::default() };
        let findings = [(FindingKind::TooLong, dropped)].into();
        let tokens = 100 - tokens_cut;
        Diagnosis { rows: 10, rows_kept, tokens, tokens_cut, findings, ..Diagnosis::default() }.to_string()
    };
    assert!(!lost(2, 20, 8).contains("WARNING"), "{}", lost(2, 20, 8));
    for (report, shares) in [(lost(2, 21, 8), "lose 21.0 %"), (lost(3, 0, 7), "3 of 10 records (30.0 %)")] {
        for words in ["WARNING: ", shares, "raise max_seq_len", "data.overflow = \"split\""] {
            assert!(report.contains(words), "{words:?} is not in {report}");
        }
    }
    assert!(!lost(10, 100, 0).contains("WARNING"), "nothing is kept, which is an error");
}

#[test]
fn too_many_bad_records_and_missing_ends_of_turns_are_refused() {
    let judge = |template: &str, bad: usize| {
        let record = |row| chat(if row < bad { &[("user", "q")] } else { &[("user", "q"), ("assistant", "a")] });
        let records = (0..100).map(record);
        diagnosed(&tokenizer(Some(template)), &EncodeOptions::new(40), records).check(0.1, true)
    };
    assert!(judge(TEMPLATE, 10).is_ok());
    let error = judge(TEMPLATE, 11).unwrap_err();
    assert!(matches!(error, DataError::TooManyBadRows { bad: 11, rows: 100, .. }), "{error}");
    assert!(error.to_string().contains("11.0 %") && error.to_string().contains("roles: user"), "{error}");
    let endless = TEMPLATE.replace("{{ eos_token }}", "");
    let error = judge(&endless, 0).unwrap_err();
    assert!(matches!(error, DataError::EndNeverTrained { chats: 100, .. }), "{error}");
}

#[test]
fn the_fingerprint_has_the_day_where_a_date_is_read() {
    const DAY: i64 = 86_400;
    let dated = TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ strftime_now('%d %b %Y') }}");
    let chat = chat(&[("user", "q"), ("assistant", "a")]);
    let text = json!({ "text": "a" });
    let fingerprint = |template: &str, record: &Json, date: i64| {
        let mut tokenizer = tokenizer(Some(template));
        tokenizer.set_date(date);
        let record = self::record(record);
        let encoder = Encoder::new(&tokenizer, EncodeOptions::new(99), &record).unwrap();
        (encoder.fingerprint(), encoder.encode(&record).unwrap())
    };
    let first = fingerprint(&dated, &chat, 20_000 * DAY);
    assert_eq!(first, fingerprint(&dated, &chat, 20_001 * DAY - 1));
    let next = fingerprint(&dated, &chat, 20_001 * DAY);
    assert!(first.0 != next.0 && first.1 != next.1);
    for (template, record) in [(TEMPLATE, &chat), (dated.as_str(), &text)] {
        assert_eq!(fingerprint(template, record, 20_000 * DAY), fingerprint(template, record, 20_001 * DAY));
    }
}

#[test]
fn chosen_template_sees_the_date_that_was_set() {
    let mut tokenizer = tokenizer(Some(TEMPLATE));
    assert_eq!(tokenizer.date(), None);
    tokenizer.set_date(0);
    tokenizer.choose_template(&TemplateChoice::Text("{{ strftime_now('%Y') }}".to_owned())).unwrap();
    assert_eq!(tokenizer.date(), Some(0));
    assert_eq!(tokenizer.chat_template().unwrap().render(&Chat::default(), false).unwrap(), "1970");
}

#[test]
fn flags_select_messages_of_any_role() {
    let tokenizer = tokenizer(Some(TEMPLATE));
    let options = EncodeOptions { train_on: TrainOn::Flags, ..EncodeOptions::new(200) };
    let record = |flags: [Json; 4]| {
        let turns = [("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")];
        let turn = |((role, content), flag): ((&str, &str), Json)| {
            let mut message = json!({ "role": role, "content": content });
            message.as_object_mut().unwrap().extend(flag.as_object().unwrap().clone());
            message
        };
        json!({ "messages": turns.into_iter().zip(flags).map(turn).collect::<Vec<_>>() })
    };
    let none = || json!({});
    let of = |flags: [Json; 4]| encode(&tokenizer, &options, &record(flags)).unwrap();
    for yes in [json!({ "train": true }), json!({ "training": true }), json!({ "trained": 1 }), json!({ "weight": 1 })]
    {
        assert_eq!(loss_text(&tokenizer, &of([none(), none(), none(), yes.clone()])), [".a2</s>."], "{yes}");
        assert_eq!(loss_text(&tokenizer, &of([none(), none(), yes, json!({ "weight": 0 })])), [".q2</s>."]);
    }
    assert_eq!(kinds(&of([none(), none(), none(), none()])), [FindingKind::NoFlags]);
    assert_eq!(kinds(&of([none(), json!({ "train": false }), none(), none()])), [FindingKind::NothingToTrain]);
    // Records that cannot have a flag.
    let alpaca = json!({ "instruction": "Add.", "output": "3" });
    for row in [alpaca, json!({ "text": "a" }), json!({ "prompt": "a", "completion": "b" })] {
        assert_eq!(kinds(&encode(&tokenizer, &options, &row).unwrap()), [FindingKind::NoFlags], "{row}");
    }
}

#[test]
fn an_unknown_role_is_found_unless_the_recipe_names_it() {
    let (tokenizer, options) = (tokenizer(Some(TEMPLATE)), EncodeOptions::new(200));
    let record = chat(&[("usr", "q"), ("assistant", "a")]);
    let encoded = encode(&tokenizer, &options, &record).unwrap();
    assert_eq!((kinds(&encoded), encoded.examples.len()), (vec![FindingKind::OtherRole], 1));
    let detail = &encoded.findings[0].detail;
    assert!(detail.contains("write data.roles = { \"usr\" = \"user\" }"), "{detail}");
    let fields = Fields { roles: [("usr".to_owned(), "user".to_owned())].into(), ..Fields::default() };
    let named = EncodeOptions { fields, ..options };
    assert_eq!(kinds(&encode(&tokenizer, &named, &record).unwrap()), []);
}

#[test]
fn a_source_without_any_flag_is_refused_with_the_keys_of_flags() {
    let tokenizer = tokenizer(Some(TEMPLATE));
    let options = EncodeOptions { train_on: TrainOn::Flags, ..EncodeOptions::new(200) };
    let rows = |flagged: usize| {
        let record = |row| {
            let mut record = chat(&[("user", "q"), ("assistant", "a")]);
            if row < flagged {
                record["messages"][1]["train"] = true.into();
            }
            record
        };
        diagnosed(&tokenizer, &options, (0..20).map(record))
    };
    for allowed in [0.1, 1.0] {
        let error = rows(0).check(allowed, true).unwrap_err();
        assert!(matches!(error, DataError::NoFlags(20)), "{error}");
        for key in ["\"train\"", "\"training\"", "\"trained\"", "\"weight\"", "\"assistant\""] {
            assert!(error.to_string().contains(key), "{error}");
        }
    }
    assert!(rows(1).check(1.0, true).is_ok());
    let error = rows(1).check(0.5, true).unwrap_err();
    assert!(matches!(error, DataError::TooManyBadRows { bad: 19, .. }), "{error}");
}

#[test]
fn with_loss_on_everything_the_end_counts_unless_it_is_cut_off() {
    let record = chat(&[("user", "q"), ("assistant", "a")]);
    let ended = |template: &str, max_seq_len| {
        let tokenizer = tokenizer(Some(template));
        let options = EncodeOptions { train_on: TrainOn::All, ..EncodeOptions::new(max_seq_len) };
        diagnosed(&tokenizer, &options, [record.clone()].into_iter()).check(0.1, true).is_ok()
    };
    let plain = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}";
    assert!(ended(TEMPLATE, 99) && ended(plain, 99));
    assert!(!ended(plain, 4), "cut before any end");
}

#[test]
fn templates_that_do_not_parse_are_refused() {
    let mut tokenizer = tokenizer(None);
    let brackets = "{{ ".to_owned() + &"(".repeat(20_000);
    for source in
        ["{{", "{% set", "{% generation %}", "{% endgeneration %}", "{% call %}", "{# ", "{{ 'a", brackets.as_str()]
    {
        assert!(tokenizer.choose_template(&TemplateChoice::Text(source.to_owned())).is_err(), "{source:.20}");
    }
}

#[test]
fn chosen_roles_count_in_the_loss_with_the_ends_of_their_turns() {
    let tokenizer = tokenizer(Some(TEMPLATE));
    let record = chat(&[("user", "q1"), ("tool", "t"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")]);
    let trained = |roles: &[&str], train_on| {
        let roles_to_train = roles.iter().map(ToString::to_string).collect();
        let options = EncodeOptions { roles_to_train, train_on, ..EncodeOptions::new(200) };
        loss_text(&tokenizer, &encode(&tokenizer, &options, &record).unwrap())[0].clone()
    };
    assert_eq!(trained(&["assistant"], TrainOn::Assistant), ".a1</s>.a2</s>.");
    assert_eq!(trained(&["assistant", "tool"], TrainOn::Assistant), ".t</s>.a1</s>.a2</s>.");
    assert_eq!(trained(&["user"], TrainOn::Assistant), ".q1</s>.q2</s>.");
    assert_eq!(trained(&["tool", "assistant"], TrainOn::Last), ".a2</s>.");
    let reversed = chat(&[("system", "s"), ("assistant", "a"), ("user", "q")]);
    let reversed = encode(&tokenizer, &EncodeOptions::new(200), &reversed).unwrap();
    assert_eq!(kinds(&reversed), [FindingKind::AnswerFirst]);
}

#[test]
fn defaults_reach_conversations_that_say_nothing_else() {
    let template = TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ mode }}|");
    let mut tokenizer = tokenizer(Some(&template));
    let before = tokenizer.fingerprint();
    let defaults = json!({ "mode": "quick" }).as_object().unwrap().clone();
    tokenizer
        .set_template_defaults(TemplateDefaults { arguments: defaults, system_prompt: Some("Be kind.".to_owned()) });
    assert_ne!(tokenizer.fingerprint(), before);
    let text = |record: &Json| {
        let encoded = encode(&tokenizer, &EncodeOptions::new(300), record).unwrap();
        tokenizer.decode(&encoded.examples[0].tokens, false).unwrap()
    };
    let plain = chat(&[("user", "q"), ("assistant", "a")]);
    assert_eq!(text(&plain), "<s>quick|<|system|>\nBe kind.</s>\n<|user|>\nq</s>\n<|assistant|>\na</s>\n");
    let mut own = chat(&[("system", "s"), ("user", "q"), ("assistant", "a")]);
    own["chat_template_kwargs"] = json!({ "mode": "slow" });
    assert_eq!(text(&own), "<s>slow|<|system|>\ns</s>\n<|user|>\nq</s>\n<|assistant|>\na</s>\n");
    let rendered = tokenizer.chat_template().unwrap().render(&Chat::new(&[("user", "q")]), true).unwrap();
    assert_eq!(
        rendered, "<s>quick|<|system|>\nBe kind.</s>\n<|user|>\nq</s>\n<|assistant|>\n",
        "a prompt is what training saw"
    );
}

#[test]
fn built_in_templates_need_their_tokens() {
    let mut tokenizer = tokenizer(None);
    let named = |name: &str| TemplateChoice::Named(name.to_owned());
    tokenizer.choose_template(&named("zephyr")).unwrap();
    let encoded = encode(&tokenizer, &EncodeOptions::new(99), &chat(&[("user", "q"), ("assistant", "a")])).unwrap();
    assert_eq!(loss_text(&tokenizer, &encoded), [".a</s>."]);
    let error = tokenizer.choose_template(&named("gemma")).unwrap_err().to_string();
    assert!(error.contains("<start_of_turn>") && error.contains("\"zephyr\""), "{error}");
}
