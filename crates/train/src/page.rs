//! HTML pages as data: blocks that one template (`page.html`) renders. A page is one file with its style inside, no script and no external resources,
//! in the colors of the reader's light or dark mode.

use minijinja::{Environment, Error, Output, State, Value, context};
use serde::Serialize;

use crate::plot::{self, escape};

const TEMPLATE: &str = include_str!("page.html");

/// A page.
#[derive(Clone, Debug)]
pub struct Page {
    /// Heading of the page.
    pub name: String,
    /// What the page shows, for the window's title.
    pub what: String,
    /// CSS rules in addition to those of every page.
    pub style: &'static str,
    /// The contents.
    pub blocks: Vec<Block>,
}

/// A part of a page. Texts are shown as they are, whatever they contain.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Block {
    /// A heading of this level.
    Heading(u8, String),
    /// A paragraph that keeps its line breaks.
    Text(String),
    /// A list.
    List(Vec<String>),
    /// A table.
    Table(Table),
    /// Figures of [`plot::Plot::figure`], side by side.
    Plots(Vec<String>),
    /// Blocks that are folded under a line.
    Folded(String, Vec<Block>),
    /// Text in a monospaced font.
    Verbatim(String),
}

/// The content of a table's column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Column {
    /// Words.
    Text,
    /// Numbers, aligned to the right.
    Number,
    /// Bars: start and width in percent, as in `0 37.5`.
    Bar,
}

/// A table.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Table {
    /// Names and kinds of the columns; if all names are empty there is no head.
    pub columns: Vec<(&'static str, Column)>,
    /// The class of each row for the page's style, and its cells.
    pub rows: Vec<(&'static str, Vec<String>)>,
}

impl Table {
    /// Creates a table of names with their values.
    pub fn of_pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, String)>) -> Self {
        let row = |(name, value): (&str, String)| ("", vec![name.to_owned(), value]);
        Self { columns: vec![("", Column::Text); 2], rows: pairs.into_iter().map(row).collect() }
    }
}

impl Block {
    /// Creates a heading of the second level.
    pub fn heading(text: &str) -> Self {
        Self::Heading(2, text.to_owned())
    }
}

impl Page {
    /// Renders the HTML.
    ///
    /// # Panics
    /// If the template does not fit its data; a test would have failed.
    pub fn render(&self) -> String {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_formatter(write);
        let Self { name, what, style, blocks } = self;
        let values = context! { name, what, style, blocks, plot_style => plot::STYLE };
        environment.render_named_str("page.html", TEMPLATE, values).expect("the template fits its data")
    }
}

/// Writes a value of the template, escaped unless it is marked as safe.
fn write(output: &mut Output<'_>, _: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    let text = value.to_string();
    Ok(output.write_str(&if value.is_safe() { text } else { escape(&text) })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "a <b> & \"c\"\u{1b}";
    const SHOWN: &str = "a &lt;b&gt; &amp; &quot;c&quot;\\u{1b}";

    /// Returns a page with every kind of block, each with [`TEXT`].
    fn page() -> Page {
        let text = || TEXT.to_owned();
        let rows = vec![("bad", vec![text(), "7".to_owned(), "25.0 50.0".to_owned()])];
        let columns = vec![("name", Column::Text), ("count", Column::Number), ("", Column::Bar)];
        let blocks = vec![
            Block::Heading(3, text()),
            Block::Text(text() + "\nnext"),
            Block::List(vec![text(), text()]),
            Block::Table(Table { columns, rows }),
            Block::Table(Table::of_pairs([("key", text())])),
            Block::Plots(vec!["<figure></figure>".to_owned(); 2]),
            Block::Folded(text(), vec![Block::heading("inside"), Block::Verbatim(text())]),
        ];
        Page { name: text(), what: "test".to_owned(), style: ".own { color: red }\n", blocks }
    }

    /// Returns the names of the elements that are open at the end; a wrong end tag is an error.
    fn still_open(page: &str) -> Result<Vec<String>, String> {
        let mut open = Vec::new();
        for tag in page.split('<').skip(1) {
            let inside = tag.split('>').next().ok_or("a tag without end")?;
            let name = inside.split_whitespace().next().unwrap_or_default().trim_end_matches('/');
            match name.strip_prefix('/') {
                _ if inside.starts_with('!') || inside.ends_with('/') => {}
                None => open.push(name.to_owned()),
                Some(ended) if open.last().is_some_and(|last| last == ended) => drop(open.pop()),
                Some(ended) => return Err(format!("</{ended}> ends {:?}", open.last())),
            }
        }
        Ok(open)
    }

    #[test]
    fn every_element_ends_and_text_is_no_markup() {
        assert_eq!(still_open("<a><b/></a><!doctype html><c d=\"e\">").unwrap(), ["c"]);
        assert!(still_open("<a><b></a></b>").is_err());
        let page = page().render();
        assert_eq!(still_open(&page), Ok(Vec::new()), "{page}");
        assert!(!page.contains(TEXT));
        // The text appears in the heading, the title and every block that has it.
        assert_eq!(page.matches(SHOWN).count(), 2 + 8, "{page}");
    }

    #[test]
    fn every_kind_of_block_is_written() {
        let page = page().render();
        for part in [
            "<h3>a ",
            "<br/>\nnext",
            "<tr><th class=\"text\">name</th><th class=\"number\">count</th>",
            "<tr class=\"bad\"><td class=\"text\">",
            "<td class=\"number\">7</td><td class=\"bar\"><div style=\"margin-left: 25.0%; width: 50.0%\"></div></td></tr>",
            "<td class=\"text\">key</td>",
            "<figure></figure><figure></figure>",
            "<h2>inside</h2>",
            "<pre>a ",
            ".own { color: red }",
            "prefers-color-scheme: dark",
        ] {
            assert!(page.contains(part), "{part:?} is not in {page}");
        }
        assert_eq!(page.matches("<th ").count(), 3, "a table of pairs has no head");
    }

    #[test]
    fn a_page_fetches_nothing() {
        let page = page().render();
        for outside in ["http", "//", "src=", "href=", "url(", "@import", "<script", "<link"] {
            assert!(!page.contains(outside), "{outside:?} in the page");
        }
    }
}
