//! Every format, and everything that can be wrong with a trace.

use std::io::{BufRead, BufReader, Read};
use std::time::Duration;

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::Gamma;

use super::*;

fn read(format: TraceFormat, text: &str) -> Vec<Result<TraceRequest, TraceError>> {
    TraceReader::new(format, text.as_bytes()).collect()
}

fn good(format: TraceFormat, text: &str) -> Vec<TraceRequest> {
    read(format, text).into_iter().map(|request| request.unwrap_or_else(|error| panic!("{error}"))).collect()
}

/// The error that a trace ends with, and how many requests came before it.
fn bad(format: TraceFormat, text: &str) -> (usize, TraceError) {
    let mut all = read(format, text);
    let last = all.pop().expect("an error, at least").expect_err("it must not be read");
    assert!(all.iter().all(Result::is_ok), "nothing comes after an error");
    (all.len(), last)
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:46.6805901,396,109
2023-11-16 18:16:00,91,0
";

#[test]
fn azures_times_keep_their_seventh_digit() {
    let all = good(TraceFormat::Azure, AZURE);
    let lengths: Vec<_> = all.iter().map(|request| (request.line, request.input, request.output)).collect();
    assert_eq!(lengths, [(2, 374, 44), (3, 396, 109), (4, 91, 1)], "nothing generated is one token of work");
    assert_eq!((all[0].at, all[1].at), (Duration::ZERO, Duration::from_nanos(100)));
    assert_eq!(all[2].at, Duration::from_nanos(13_319_410_000));
    let zoned = "TIMESTAMP,ContextTokens,GeneratedTokens\r
2024-05-10 00:00:00.009930+00:00,2162,5\r
2024-05-10 02:00:01.009930+02:00,2399,6\r
";
    assert_eq!(good(TraceFormat::Azure, zoned)[1].at, Duration::from_secs(1));
}

#[test]
fn burstgpts_failures_are_passed_over_and_sessions_read() {
    let old = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,API log
118.0,GPT-4,417,276,693,Conversation log
";
    let mut reader = TraceReader::new(TraceFormat::BurstGpt, old.as_bytes());
    let all: Vec<_> = reader.by_ref().map(Result::unwrap).collect();
    let told: Vec<_> = all.iter().map(|request| (request.at, request.input, request.output)).collect();
    assert_eq!(told, [(Duration::ZERO, 472, 18), (Duration::from_secs(113), 417, 276)]);
    assert_eq!(reader.notes(), TraceNotes { failed: 1, ..TraceNotes::default() });
    let newer = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
0.5,s1,2.1,GPT-4,10,5,15,API log
0.7,s2,2.1,GPT-4,10,5,15,API log
0.9,s1,2.1,GPT-4,10,5,15,API log
";
    let sessions: Vec<_> = good(TraceFormat::BurstGpt, newer).iter().map(|request| request.session).collect();
    assert!(sessions[0].is_some() && sessions[0] == sessions[2] && sessions[0] != sessions[1]);
}

#[test]
fn equal_hash_ids_are_equal_beginnings_and_half_blocks_are_nobodys() {
    let text = r#"{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 27, "input_length": 1536, "output_length": 6, "hash_ids": [7, 8, 10]}
{"timestamp": 27, "input_length": 600, "output_length": 7, "hash_ids": [8]}
"#;
    let all = good(TraceFormat::Mooncake, text);
    assert_eq!([all[0].at, all[1].at, all[2].at], [ms(0), ms(27), ms(27)]);
    let hashes = |number: usize| &all[number].blocks.hashes;
    assert_eq!((all[0].blocks.tokens, hashes(0).len(), hashes(1).len()), (512, 2, 3));
    assert_eq!(hashes(0)[..2], hashes(1)[..2]);
    assert_ne!(hashes(2)[0], hashes(0)[1], "the same block behind another beginning is another prefix");
}

#[test]
fn bailians_lines_are_read_with_their_conversations() {
    let text = r#"{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 132, "type": "text", "turn": 1, "hash_ids": [1089, 1090, 1091]}
{"chat_id": 160, "parent_chat_id": 159, "timestamp": 61.5, "input_length": 64, "output_length": 1, "type": "text", "turn": 2, "hash_ids": [1089, 1090, 1092, 1093]}
"#;
    let all = good(TraceFormat::Bailian, text);
    assert_eq!(all[1].at, ms(386));
    assert_eq!((all[0].blocks.tokens, all[0].blocks.hashes.len(), all[1].blocks.hashes.len()), (16, 2, 4));
    assert_eq!(all[0].blocks.hashes[..], all[1].blocks.hashes[..2]);
    assert_eq!(all[0].session, all[1].session);
}

/// Lines in the order in which requests ended.
const JOURNAL: &str = r#"{"journal":"goodput","version":1,"written_by":"0.1.0","opened_unix_ns":1,"hash_key_id":"11bd06a5","hash_key":"file","prefix_block_bytes":512}
{"arrival_unix_ns":1790000000500000000,"endpoint":"/v1/chat/completions","tenant":"a15d4cf3700f7791","class":"chat","stream":true,"prompt_tokens":300,"output_tokens":20,"prefix":["0123456789ab","f9ea477f5e44"],"outcome":"met","something_new":[1]}
{"arrival_unix_ns":1790000000600000000,"endpoint":"/v1/models","outcome":"excluded","reason":"unjudged"}
{"arrival_unix_ns":1790000000200000000,"endpoint":"/v1/completions","class":"batch","prompt_tokens":90,"output_tokens":400,"choices":4,"max_output_tokens":500,"outcome":"met"}
{"arrival_unix_ns":1790000000700000000,"endpoint":"/v1/chat/completions","class":"chat","stream":true,"prompt_tokens":260,"prefix":["0123456789ab"],"outcome":"missed","reason":"shed"}
{"arrival_unix_ns":1790000000800000000,"endpoint":"/v1/chat/completions","class":"chat","prompt_tokens":9,"outcome":"excluded","reason":"invalid_request"}
{"arrival_unix_ns":17900000008
"#;

#[test]
fn a_journal_is_sorted_by_arrival_and_only_work_is_replayed() {
    let mut reader = TraceReader::new(TraceFormat::Journal, JOURNAL.as_bytes());
    let all: Vec<_> = reader.by_ref().map(Result::unwrap).collect();
    let told: Vec<_> =
        all.iter().map(|request| (request.at, request.class.as_deref().unwrap(), request.output)).collect();
    assert_eq!(told, [(ms(0), "batch", 100), (ms(300), "chat", 20), (ms(500), "chat", 20)]);
    assert_eq!(reader.notes(), TraceNotes { not_generating: 2, unreadable: 1, guessed_output: 1, failed: 0 });
    assert_eq!((all[1].stream, all[0].stream), (Some(true), Some(false)));
    assert_eq!((all[0].cap, all[0].tenant), (Some(500), None));
    assert!(all[1].tenant.is_some());
    assert_eq!(all[1].blocks.hashes.len(), 2);
    assert_eq!(all[1].blocks.hashes[0], all[2].blocks.hashes[0], "the same beginning");
}

#[test]
fn hashes_under_another_key_are_other_prompts() {
    let line = |at: u64| {
        format!(r#"{{"arrival_unix_ns":{at},"prompt_tokens":300,"output_tokens":2,"prefix":["0123456789ab"]}}"#)
    };
    let header = |key: &str| format!(r#"{{"journal":"goodput","version":1,"hash_key_id":"{key}"}}"#);
    let text = [header("aa"), line(1), line(2), header("bb"), line(3)].join("\n");
    let all = good(TraceFormat::Journal, &text);
    let first = |number: usize| all[number].blocks.hashes[0];
    assert!(first(0) == first(1) && first(0) != first(2));
}

#[test]
fn a_journal_that_is_too_new_or_too_late_is_told() {
    let (_, error) = bad(TraceFormat::Journal, "{\"journal\":\"goodput\",\"version\":2}\n");
    assert_eq!(error.to_string(), "line 1: this journal is of version 2; this program reads version 1");
    let second = 1_000_000_000;
    let line = |at: u64| format!("{{\"arrival_unix_ns\":{},\"prompt_tokens\":3,\"output_tokens\":2}}\n", at * second);
    let text = [10, 5000, 10_000, 11].map(line).concat();
    let (before, error) = bad(TraceFormat::Journal, &text);
    assert_eq!(before, 2);
    assert!(matches!(error.fault, TraceFault::TooLate { .. }) && error.line == 4, "{error}");
    let negative = "{\"arrival_unix_ns\":1,\"prompt_tokens\":-3,\"output_tokens\":2}\n";
    assert!(bad(TraceFormat::Journal, negative).1.to_string().contains("prompt_tokens is \"-3\""));
}

#[test]
fn a_format_is_known_by_its_first_line() {
    let of = TraceFormat::of_first_line;
    assert_eq!(of(JOURNAL.lines().next().unwrap()), Some(TraceFormat::Journal));
    assert_eq!(of(JOURNAL.lines().nth(1).unwrap()), Some(TraceFormat::Journal), "a journal without its beginning");
    assert_eq!(of("\u{feff}TIMESTAMP,ContextTokens,GeneratedTokens\r"), Some(TraceFormat::Azure));
    assert_eq!(of("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"), Some(TraceFormat::BurstGpt));
    assert_eq!(of(r#"{"timestamp": 0, "input_length": 6755, "output_length": 500}"#), Some(TraceFormat::Mooncake));
    assert_eq!(of(r#"{"chat_id": 1, "timestamp": 0, "input_length": 5}"#), Some(TraceFormat::Bailian));
    assert_eq!((of("{}"), of("a,b"), of("")), (None, None, None));
    for format in TraceFormat::ALL {
        assert_eq!(format.as_str().parse(), Ok(format));
    }
    assert!("csv".parse::<TraceFormat>().unwrap_err().contains("azure, burstgpt"));
}

#[test]
fn what_is_wrong_is_told_with_its_line() {
    let azure = |rows: &str| format!("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,1,1\n{rows}");
    let gpt = |rows: &str| format!("Timestamp,Model,Request tokens,Response tokens\n1,m,1,1\n{rows}");
    let mooncake = |rows: &str| {
        format!("{{\"timestamp\": 5, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": []}}\n{rows}")
    };
    let cases = [
        (
            TraceFormat::Azure,
            azure("2023-11-16 18:15:46.4,1,1\n"),
            3,
            "came 100ms before the one in the line above; sort",
        ),
        (
            TraceFormat::Azure,
            azure("2023-11-16 18:15:47.4,-1,1\n"),
            3,
            "ContextTokens is \"-1\"; it must be a number of tokens",
        ),
        (TraceFormat::Azure, azure("2023-11-16 18:15:47.4,NaN,1\n"), 3, "ContextTokens is \"NaN\""),
        (TraceFormat::Azure, azure("2023-11-16 18:15:47.4,1,1.5\n"), 3, "GeneratedTokens is \"1.5\""),
        (TraceFormat::Azure, azure("yesterday,1,1\n"), 3, "TIMESTAMP is \"yesterday\"; it must be a time such as"),
        (TraceFormat::Azure, azure("2023-11-16 18:15:4"), 3, "1 fields where the head has 3: half a line?"),
        (TraceFormat::Azure, azure("2023-11-16 18:15:47,1,1,9\n"), 3, "4 fields where the head has 3"),
        (TraceFormat::Azure, "TIMESTAMP,ContextTokens\n1,2\n".to_owned(), 1, "no field \"GeneratedTokens\""),
        (TraceFormat::BurstGpt, gpt("nan,m,1,1\n"), 3, "Timestamp is \"nan\"; it must be a number of seconds"),
        (TraceFormat::BurstGpt, gpt("-1,m,1,1\n"), 3, "Timestamp is \"-1\""),
        (TraceFormat::BurstGpt, gpt("0,m,1,1\n"), 3, "came 1s before"),
        (TraceFormat::Mooncake, mooncake("{\"timestamp\": 6, \"input_len"), 2, "the last line is cut off"),
        (
            TraceFormat::Mooncake,
            mooncake("{\"timestamp\": 6, \"input_len\n"),
            2,
            "EOF while parsing a string at column 27",
        ),
        (TraceFormat::Mooncake, mooncake("{\"timestamp\": 6, \"output_length\": 1}\n"), 2, "no field \"input_length\""),
        (
            TraceFormat::Mooncake,
            mooncake("{\"timestamp\": 6, \"input_length\": -4, \"output_length\": 1}\n"),
            2,
            "input_length is \"-4\"",
        ),
        (
            TraceFormat::Mooncake,
            mooncake("{\"timestamp\": NaN, \"input_length\": 4, \"output_length\": 1}\n"),
            2,
            "expected value",
        ),
        (
            TraceFormat::Mooncake,
            mooncake("{\"timestamp\": 1, \"input_length\": 4, \"output_length\": 1}\n"),
            2,
            "came 4ms before",
        ),
        (TraceFormat::Bailian, mooncake("[]\n"), 2, "invalid"),
    ];
    for (format, text, line, told) in cases {
        let (before, error) = bad(format, &text);
        assert!(error.line == line && error.to_string().contains(told), "{text}: {error}");
        assert_eq!(before, usize::from(line > 1), "what stands before it is read: {text}");
    }
}

#[test]
fn a_trace_without_requests_is_an_error() {
    for format in TraceFormat::ALL {
        let csv_head = match format {
            TraceFormat::Azure => "TIMESTAMP,ContextTokens,GeneratedTokens\n",
            TraceFormat::BurstGpt => "Timestamp,Model,Request tokens,Response tokens\n1,m,1,0\n",
            _ => "\n\n",
        };
        let (before, error) = bad(format, csv_head);
        assert!(before == 0 && matches!(error.fault, TraceFault::Empty), "{format:?}: {error}");
    }
    assert!(matches!(bad(TraceFormat::Azure, "").1.fault, TraceFault::Missing("TIMESTAMP")));
}

/// A file of any size, made as it is read.
struct Endless {
    left: u64,
    line: Vec<u8>,
    at: usize,
    make: fn(u64) -> String,
}

impl Read for Endless {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.at == self.line.len() && self.left > 0 {
            self.left -= 1;
            self.line = (self.make)(self.left).into_bytes();
            self.at = 0;
        }
        let count = buffer.len().min(self.line.len() - self.at);
        buffer[..count].copy_from_slice(&self.line[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

#[test]
fn a_line_without_an_end_is_refused_before_it_fills_the_memory() {
    let endless = Endless { left: u64::MAX, line: Vec::new(), at: 0, make: |_| "1,".repeat(1000) };
    let mut reader = TraceReader::new(TraceFormat::Mooncake, BufReader::new(endless));
    let error = reader.next().unwrap().unwrap_err();
    assert!(matches!(error.fault, TraceFault::TooLong { .. }), "{error}");
    assert!(reader.next().is_none());
}

#[test]
fn reading_is_streamed_and_an_unreadable_file_is_told() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("the disk is gone"))
        }
    }
    for format in TraceFormat::ALL {
        let broken: Box<dyn BufRead> = Box::new(BufReader::new(Broken));
        let error = TraceReader::new(format, broken).next().unwrap().unwrap_err();
        assert!(error.to_string().contains("the disk is gone"), "{format:?}: {error}");
    }
    let row = |left: u64| format!("{{\"timestamp\": {}, \"input_length\": 3, \"output_length\": 2}}\n", 100_000 - left);
    let endless = Endless { left: 100_000, line: Vec::new(), at: 0, make: row };
    let mut reader = TraceReader::new(TraceFormat::Mooncake, BufReader::with_capacity(4096, endless));
    assert_eq!(reader.by_ref().map(Result::unwrap).count(), 100_000);
}

// ---- reshaping -------------------------------------------------------------------------------------------

/// Requests with gamma gaps of this squared coefficient of variation, and a rate that swings between 2 and 18 a
/// second over ten minutes.
fn bursty(variation: f64, seconds: f64, seed: u64) -> Vec<TraceRequest> {
    let mut chance = StdRng::seed_from_u64(seed);
    let gaps = Gamma::new(1.0 / variation, variation).unwrap();
    let mut at = 0.0;
    let mut all = Vec::new();
    while at < seconds {
        let rate = 10.0 + 8.0 * (at / 600.0 * std::f64::consts::TAU).sin();
        at += chance.sample(gaps) / rate;
        let blocks = PromptBlocks::from_ids(16, 64, [all.len() as u64 / 4, 7]);
        let at = Duration::from_secs_f64(at);
        all.push(TraceRequest { at, input: 64, output: 1, blocks, ..TraceRequest::default() });
    }
    all
}

fn reshaped(how: Reshape, trace: &[TraceRequest]) -> Vec<TraceRequest> {
    how.apply(trace.iter().cloned().map(Ok)).unwrap().map(Result::unwrap).collect()
}

/// Squared coefficient of variation of the gaps, over those of each minute's own mean.
fn burstiness(all: &[TraceRequest]) -> f64 {
    let mut scaled = Vec::new();
    let minute = |request: &TraceRequest| request.at.as_secs() / 60;
    for group in all.chunk_by(|a, b| minute(a) == minute(b)).filter(|group| group.len() > 50) {
        let gaps: Vec<f64> = group.windows(2).map(|pair| (pair[1].at - pair[0].at).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        scaled.extend(gaps.iter().map(|gap| gap / mean));
    }
    scaled.iter().map(|gap| (gap - 1.0).powi(2)).sum::<f64>() / scaled.len() as f64
}

/// Requests of the busiest minutes over those of the calmest.
fn swing(all: &[TraceRequest], minutes: usize) -> f64 {
    let mut counts = vec![0.0; minutes];
    all.iter().for_each(|request| counts[(request.at.as_secs() / 60) as usize % minutes] += 1.0);
    counts.sort_by(f64::total_cmp);
    (counts[minutes - 1] + counts[minutes - 2]) / (counts[0] + counts[1])
}

#[test]
fn another_rate_keeps_bursts_and_swings() {
    let trace = bursty(4.0, 6000.0, 5);
    let (own, own_swing) = (burstiness(&trace), swing(&trace, 10));
    for rate in [0.5, 0.8, 1.7, 3.0] {
        let other = reshaped(Reshape { rate, ..Reshape::default() }, &trace);
        assert!(other.is_sorted_by_key(|request| request.at), "{rate}");
        let times = other.len() as f64 / trace.len() as f64;
        assert!((times / rate - 1.0).abs() < 0.05, "{rate}: {times}");
        assert!((burstiness(&other) / own - 1.0).abs() < 0.15, "{rate}: {} {own}", burstiness(&other));
        assert!((swing(&other, 10) / own_swing - 1.0).abs() < 0.3, "{rate}: {} {own_swing}", swing(&other, 10));
    }
    // What chance would do: half of the requests, and far fewer bursts.
    let mut chance = StdRng::seed_from_u64(1);
    let thinned: Vec<_> = trace.iter().filter(|_| chance.random_bool(0.5)).cloned().collect();
    assert!(burstiness(&thinned) < 0.75 * own, "{} {own}", burstiness(&thinned));
}

#[test]
fn copies_have_prompts_of_their_own_that_share_as_before() {
    let trace = bursty(1.0, 120.0, 2);
    let twice = reshaped(Reshape { rate: 2.0, ..Reshape::default() }, &trace);
    let hashes = |all: &[TraceRequest]| {
        all.iter().map(|request| request.blocks.hashes[0]).collect::<std::collections::HashSet<_>>()
    };
    assert_eq!(hashes(&twice).len(), 2 * hashes(&trace).len());
}

#[test]
fn a_window_begins_at_zero_and_speed_shortens_it() {
    let trace = bursty(1.0, 100.0, 3);
    let seconds = Duration::from_secs;
    let window = Reshape { from: seconds(20), to: Some(seconds(50)), ..Reshape::default() };
    let part = reshaped(window, &trace);
    let inside: Vec<_> = trace.iter().filter(|request| (seconds(20)..seconds(50)).contains(&request.at)).collect();
    assert_eq!(part.len(), inside.len());
    assert!(part.iter().zip(&inside).all(|(own, other)| own.at + seconds(20) == other.at));
    let fast = reshaped(Reshape { speed: 1.3, ..window }, &trace);
    assert_eq!(fast.len(), part.len());
    assert!(
        fast.iter().zip(&part).all(|(own, other)| (own.at.as_secs_f64() * 1.3 - other.at.as_secs_f64()).abs() < 1e-6)
    );
}

#[test]
fn changes_without_sense_are_refused_and_errors_pass_through() {
    let check = |how: Reshape| how.check().unwrap_err().to_string();
    for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(check(Reshape { speed: bad, ..Reshape::default() }).contains("the speed is"));
        assert!(check(Reshape { rate: bad, ..Reshape::default() }).contains("the rate is"));
    }
    let backwards = Reshape { from: ms(5), to: Some(ms(5)), ..Reshape::default() };
    assert!(check(backwards).contains("not after its beginning"));
    assert!(check(Reshape { slice: Duration::ZERO, ..Reshape::default() }).contains("no length"));
    let text = "Timestamp,Model,Request tokens,Response tokens\n1,m,1,1\n0,m,1,1\n";
    for rate in [1.0, 2.0] {
        let reader = TraceReader::new(TraceFormat::BurstGpt, text.as_bytes());
        let all: Vec<_> = Reshape { rate, ..Reshape::default() }.apply(reader).unwrap().collect();
        assert!(matches!(all.last(), Some(Err(_))), "{rate}: {all:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a file holds, a reader ends and says why.
    #[test]
    fn no_bytes_make_a_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), format in 0..5_usize) {
        let format = TraceFormat::ALL[format];
        let heads: [&[u8]; 2] = [b"", b"TIMESTAMP,ContextTokens,GeneratedTokens,Timestamp,Request tokens,Response tokens\n"];
        for head in heads {
            let whole = [head, &bytes[..]].concat();
            let mut seen = 0;
            for request in TraceReader::new(format, &whole[..]) {
                seen += 1;
                prop_assert!(seen < 400);
                if request.is_err() {
                    break;
                }
            }
        }
    }

    /// Cut anywhere, a trace gives the requests of its whole lines and then ends or complains.
    #[test]
    fn a_cut_trace_gives_what_was_whole(cut in 0..JOURNAL.len()) {
        if JOURNAL.is_char_boundary(cut) {
            let all = read(TraceFormat::Journal, &JOURNAL[..cut]);
            prop_assert!(all.len() <= 3);
        }
    }
}
