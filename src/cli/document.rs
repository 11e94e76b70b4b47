//! A page of results, shown as plain text or as Markdown.

/// A part of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PagePart {
    /// A heading; level 1 is the page's title.
    Heading(u8, String),
    /// A paragraph.
    Text(String),
    /// A bullet list.
    Points(Vec<String>),
    /// A table: alignment, head, and rows with as many cells.
    Table(Columns, Vec<String>, Vec<Vec<String>>),
}

/// Alignment of a table's columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Columns {
    /// Words: all to the left.
    Words,
    /// Figures: all but the first to the right.
    Figures,
}

/// A page: parts in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Document(pub Vec<PagePart>);

/// Width of a plain page.
const WIDTH: usize = 100;

impl Document {
    pub fn heading(&mut self, level: u8, text: impl Into<String>) {
        self.0.push(PagePart::Heading(level, text.into()));
    }

    pub fn text(&mut self, text: impl Into<String>) {
        self.0.push(PagePart::Text(text.into()));
    }

    pub fn points(&mut self, points: impl IntoIterator<Item = String>) {
        self.0.push(PagePart::Points(points.into_iter().collect()));
    }

    /// Adds a table of figures, unless it has no rows.
    pub fn table<const N: usize>(&mut self, head: [&str; N], rows: Vec<[String; N]>) {
        self.columns(Columns::Figures, head, rows);
    }

    /// Adds a table of words, unless it has no rows.
    pub fn listing<const N: usize>(&mut self, head: [&str; N], rows: Vec<[String; N]>) {
        self.columns(Columns::Words, head, rows);
    }

    fn columns<const N: usize>(&mut self, columns: Columns, head: [&str; N], rows: Vec<[String; N]>) {
        if !rows.is_empty() {
            let rows = rows.into_iter().map(|row| row.to_vec()).collect();
            self.0.push(PagePart::Table(columns, head.map(str::to_owned).to_vec(), rows));
        }
    }

    /// The page as Markdown.
    pub fn markdown(&self) -> String {
        let part = |part: &PagePart| match part {
            PagePart::Heading(level, text) => format!("{} {text}\n", "#".repeat(usize::from(*level))),
            PagePart::Text(text) => format!("{text}\n"),
            PagePart::Points(points) => points.iter().map(|point| format!("- {point}\n")).collect(),
            PagePart::Table(columns, head, rows) => {
                let line = |cells: &[String]| {
                    let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
                    format!("| {} |\n", cells.join(" | "))
                };
                let other = if *columns == Columns::Figures { " ---: |" } else { " --- |" };
                let rule = format!("| --- |{}\n", other.repeat(head.len() - 1));
                let rows: String = rows.iter().map(|row| line(row)).collect();
                format!("{}{rule}{rows}", line(head))
            }
        };
        self.0.iter().map(part).collect::<Vec<_>>().join("\n")
    }

    /// The page as plain text.
    pub fn plain(&self) -> String {
        let part = |part: &PagePart| match part {
            PagePart::Heading(1, text) => format!("{text}\n{}\n", "=".repeat(text.chars().count())),
            PagePart::Heading(2, text) => format!("{text}\n{}\n", "-".repeat(text.chars().count())),
            PagePart::Heading(_, text) => format!("{text}\n"),
            PagePart::Text(text) => wrapped(text, ""),
            PagePart::Points(points) => points.iter().map(|point| wrapped(point, "- ")).collect(),
            PagePart::Table(columns, head, rows) => plain_table(*columns, head, rows),
        };
        self.0.iter().map(part).collect::<Vec<_>>().join("\n")
    }
}

/// Wraps at [`WIDTH`]: the first line behind `bullet`, the others aligned with it.
fn wrapped(text: &str, bullet: &str) -> String {
    let mut out = String::new();
    let mut line = bullet.to_owned();
    let mut is_empty = true;
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            out.push_str(&line);
            out.push('\n');
            line = " ".repeat(bullet.chars().count());
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    out + &line + "\n"
}

fn plain_table(columns: Columns, head: &[String], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let of = |row: &[String]| row[column].chars().count();
        rows.iter().map(|row| of(row)).max().unwrap_or(0).max(of(head))
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: &[String]| {
        let mut out = format!("{:<width$}", cells[0], width = widths[0]);
        for (cell, width) in cells.iter().zip(&widths).skip(1) {
            out.push_str(&match columns {
                Columns::Words => format!("  {cell:<width$}"),
                Columns::Figures => format!("  {cell:>width$}"),
            });
        }
        format!("{}\n", out.trim_end())
    };
    let rule = line(&widths.iter().map(|width| "-".repeat(*width)).collect::<Vec<_>>());
    let rows: String = rows.iter().map(|row| line(row)).collect();
    format!("{}{rule}{rows}", line(head))
}

/// Formats a number with thousands separators and this many decimals.
pub(super) fn number(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    let (sign, bare) = text.strip_prefix('-').map_or(("", text.as_str()), |bare| ("-", bare));
    let (whole, rest) = bare.split_once('.').map_or((bare, None), |(whole, rest)| (whole, Some(rest)));
    let mut grouped = String::new();
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    rest.map_or_else(|| format!("{sign}{grouped}"), |rest| format!("{sign}{grouped}.{rest}"))
}

/// Formats a number with three significant digits and no trailing zeros.
pub(super) fn short(value: f64) -> String {
    if !value.is_finite() || value == 0.0 {
        return format!("{value}");
    }
    let magnitude = value.abs().log10().floor() as i32;
    let digits = (2 - magnitude).clamp(0, 9) as usize;
    let text = number(value, digits);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Formats a share in percent.
pub(super) fn percent(share: f64) -> String {
    format!("{} %", short(100.0 * share))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_page_is_shown_in_two_ways() {
        let mut page = Document::default();
        page.heading(1, "Plan");
        page.text("word ".repeat(30));
        page.points(["one".to_owned(), "two".to_owned()]);
        page.table(
            ["what", "how much"],
            vec![["a".to_owned(), "1".to_owned()], ["longer".to_owned(), "1,000".to_owned()]],
        );
        page.listing(["a", "b"], vec![["word".to_owned(), "x".to_owned()], ["w".to_owned(), "yy".to_owned()]]);
        page.table(["nothing"], Vec::new());
        let plain = page.plain();
        assert!(plain.starts_with("Plan\n====\n\n"), "{plain}");
        assert!(plain.lines().all(|line| line.len() <= WIDTH));
        assert!(
            plain.contains("- one\n- two\n\nwhat    how much\n------  --------\na              1\nlonger     1,000\n")
        );
        assert!(plain.contains("a     b\n----  --\nword  x\nw     yy\n"), "{plain}");
        let markdown = page.markdown();
        assert!(markdown.contains("| what | how much |\n| --- | ---: |\n| a | 1 |\n"), "{markdown}");
        assert!(markdown.contains("| a | b |\n| --- | --- |\n"), "{markdown}");
    }

    #[test]
    fn numbers_are_grouped_and_short() {
        assert_eq!([number(609_000.0, 0), number(-1234.5, 1), number(999.0, 0)], ["609,000", "-1,234.5", "999"]);
        assert_eq!(
            [short(0.000_248_016), short(5.6), short(435.0), short(25_550.0)],
            ["0.000248", "5.6", "435", "25,550"]
        );
        assert_eq!([short(0.0), short(1.0), percent(0.5357), percent(0.92)], ["0", "1", "53.6 %", "92 %"]);
    }
}
