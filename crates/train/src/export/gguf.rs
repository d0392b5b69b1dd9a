//! `export --gguf`: a model as one GGUF file, and the Modelfile with its template and stops for Ollama.

use std::path::{Path, PathBuf};

use firebrick_data::Tokenizer;
use firebrick_model::{GgufEnds, GgufType, read_config, write_gguf};
use firebrick_trainer::RunError;
use firebrick_trainer::console::shell_quoted;
use firebrick_trainer::run::{chat_settings, end_of_turn};
use firebrick_trainer::storage::StorageError;

use super::modelfile::Turns;

const NO_TEMPLATE: &str = "the Modelfile has no template, because the chat template is more than turns of system, user and assistant; llama.cpp reads it \
                           from the GGUF file (llama-server --jinja), Ollama has to be given one";

/// Writes the model as one file, and the Modelfile for Ollama next to it.
pub(super) fn write(folder: &Path, out: &Path, kind: GgufType) -> Result<String, RunError> {
    let mut tokenizer = Tokenizer::from_folder(folder)?;
    tokenizer.set_template_defaults(chat_settings::read(folder)?);
    let listed = read_config(folder)?.eos_token_ids;
    let text = tokenizer.eos_token_id().or(listed.first().copied());
    // The template's end of turn, or the last that the model lists: those that a run trains come last.
    let turn = end_of_turn::in_template(&tokenizer)?.or(listed.last().copied());
    let turn = turn.filter(|_| turn != text);
    let (before_text, added) = (tokenizer.token_before_text()?, tokenizer.tokens_of_other_files());
    let ends = GgufEnds { text, turn, before_text, added };
    let mut notes = write_gguf(folder, out, kind, ends.clone())?;

    let name = out.file_name().unwrap_or_default().to_string_lossy();
    let mut text = format!("FROM ./{name}\n");
    match Turns::of(&tokenizer).and_then(|turns| turns.template()) {
        Some(template) => text += &format!("TEMPLATE \"\"\"{template}\"\"\"\n"),
        None if tokenizer.chat_template().is_ok() => notes.push(NO_TEMPLATE.to_owned()),
        None => {}
    }
    let mut stops: Vec<u32> = ends.text.into_iter().chain(ends.turn).collect();
    stops.extend(listed.into_iter().filter(|id| ![ends.text, ends.turn].contains(&Some(*id))));
    for id in stops {
        let stop = tokenizer.decode(&[id], false)?;
        // An id without a token has no text.
        if !stop.is_empty() {
            text += &format!("PARAMETER stop {}\n", quoted(&stop));
        }
    }
    let modelfile = modelfile_of(out);
    std::fs::write(&modelfile, text).map_err(|error| StorageError::io("write", &modelfile, error))?;
    let create = format!("ollama create NAME -f {}", shell_quoted(&modelfile.display().to_string()));
    let notes: String = notes.iter().map(|note| format!("\nnote: {note}")).collect();
    Ok(format!("written as {kind} to {}; for Ollama: {create}{notes}", out.display()))
}

/// Returns `m.Modelfile` for `m.gguf`; any other extension counts as part of the name.
fn modelfile_of(out: &Path) -> PathBuf {
    let is_gguf = out.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let name = if is_gguf { out.file_stem() } else { out.file_name() };
    let mut name = name.unwrap_or_default().to_owned();
    name.push(".Modelfile");
    out.with_file_name(name)
}

/// Quotes a value of a Modelfile. Nothing is escaped there; a text with a quote gets triple quotes.
fn quoted(text: &str) -> String {
    let quotes = if text.contains('"') { "\"\"\"" } else { "\"" };
    format!("{quotes}{text}{quotes}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_modelfile_is_named_and_quoted_for_ollama() {
        let of = |out: &str| modelfile_of(Path::new(out)).display().to_string();
        assert_eq!(of("out/m.gguf"), "out/m.Modelfile");
        assert_eq!(of("out/Llama-3.1-8B"), "out/Llama-3.1-8B.Modelfile");
        assert_eq!(of("Llama-3.1-8B.Q8_0.GGUF"), "Llama-3.1-8B.Q8_0.Modelfile");
        assert_eq!(quoted("<|end|>"), "\"<|end|>\"");
        assert_eq!(quoted("\\ \""), "\"\"\"\\ \"\"\"\"");
    }
}
