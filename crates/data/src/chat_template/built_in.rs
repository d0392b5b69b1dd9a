//! Chat templates by name, for base models that have none.
//!
//! The formats are those that the named models were trained with. Trade-off: texts only. Tools and calls are left out, and the encoder reports that;
//! a model that was trained with tools has its own template.

/// A template and the tokens that it requires.
pub(crate) struct BuiltIn {
    pub(crate) name: &'static str,
    pub(crate) source: &'static str,
    /// Tokens that it writes besides those of the tokenizer's files. A vocabulary without them would cut their text, and no token would end a turn.
    pub(crate) tokens: &'static [&'static str],
}

impl BuiltIn {
    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        BUILT_IN.iter().find(|template| template.name == name)
    }

    pub(crate) fn names() -> String {
        BUILT_IN.iter().map(|template| format!("{:?}", template.name)).collect::<Vec<_>>().join(", ")
    }
}

const BUILT_IN: [BuiltIn; 6] = [
    BuiltIn {
        name: "chatml",
        tokens: &["<|im_start|>", "<|im_end|>"],
        source: "\
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
    },
    BuiltIn {
        name: "llama3",
        tokens: &["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        source: "\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' ~ message.content | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}",
    },
    BuiltIn {
        name: "gemma",
        tokens: &["<start_of_turn>", "<end_of_turn>"],
        source: "\
{{- bos_token }}
{%- set first = namespace(text='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- set first.text = message.content | trim ~ '\n\n' %}
{%- else %}
{{- '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\n' }}
{{- first.text ~ message.content | trim ~ '<end_of_turn>\n' }}
{%- set first.text = '' %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}",
    },
    BuiltIn {
        name: "phi3",
        tokens: &["<|user|>", "<|assistant|>", "<|end|>"],
        source: "\
{%- for message in messages %}
{{- '<|' ~ message.role ~ '|>\n' ~ message.content ~ '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}",
    },
    BuiltIn {
        name: "zephyr",
        tokens: &[],
        source: "\
{%- for message in messages %}
{{- '<|' ~ message.role ~ '|>\n' ~ message.content ~ eos_token ~ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}",
    },
    BuiltIn {
        name: "alpaca",
        tokens: &[],
        source: "\
{{- bos_token if bos_token is defined else '' }}
{%- if not messages or messages[0].role != 'system' %}
{{- 'Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- message.content ~ '\n\n' }}
{%- elif message.role == 'assistant' %}{{- '### Response:\n' ~ message.content ~ eos_token ~ '\n\n' }}
{%- else %}{{- '### Instruction:\n' ~ message.content ~ '\n\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Response:\n' }}{%- endif %}",
    },
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use super::*;
    use crate::chat_template::ChatTemplate;
    use crate::record_format::Chat;

    #[test]
    fn every_built_in_template_writes_the_format_of_its_name() {
        let expected = [
            (
                "chatml",
                "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n<|im_start|>assistant\n",
            ),
            (
                "llama3",
                "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|>\
              <|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            ),
            (
                "gemma",
                "<s><start_of_turn>user\nS\n\nQ<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n<start_of_turn>model\n",
            ),
            ("phi3", "<|system|>\nS<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\nA<|end|>\n<|assistant|>\n"),
            ("zephyr", "<|system|>\nS</s>\n<|user|>\nQ</s>\n<|assistant|>\nA</s>\n<|assistant|>\n"),
            ("alpaca", "<s>S\n\n### Instruction:\nQ\n\n### Response:\nA</s>\n\n### Response:\n"),
        ];
        let turns = [("system", "S"), ("user", "Q"), ("assistant", "A")];
        let render = |name: &str, turns: &[(&str, &str)]| {
            let tokens = BTreeMap::from(
                [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(key, token)| (key.to_owned(), token.to_owned())),
            );
            let template = ChatTemplate::new(BuiltIn::named(name).unwrap().source, Path::new(name), tokens).unwrap();
            template.render(&Chat::new(turns), true).unwrap()
        };
        for (name, text) in expected {
            assert_eq!(render(name, &turns), text);
        }
        assert_eq!(expected.len(), BUILT_IN.len());
        // Without a system message the preamble of the Alpaca project is there, as in LLaMA-Factory.
        let preamble =
            "Below is an instruction that describes a task. Write a response that appropriately completes the request.";
        let text = format!("<s>{preamble}\n\n### Instruction:\nQ\n\n### Response:\nA</s>\n\n### Response:\n");
        assert_eq!(render("alpaca", &turns[1..]), text);
    }
}
