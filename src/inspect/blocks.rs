//! Hashes of a prompt's blocks, chained as in an engine's prefix cache: each hash covers everything
//! before it, so that two prompts share as many hashes as they have common leading blocks.
//!
//! Chat templates put tools before the system prompt and that before the messages, wherever a body has
//! them. Each of these parts ([`PromptSlot`]) therefore has its own chain while the body is read, and
//! [`Chain::finish`] concatenates them. Blocks are [`BLOCK`] bytes of decoded text; an incomplete block
//! at the end of a part is not reported, but changes the hashes behind it. Names, numbers and
//! punctuation of tools count as in JSON without spaces. A token id counts as four bytes, the typical
//! length of a token's text.
//!
//! Text boundaries and each message's role are mixed into the hash without being block bytes. A role may
//! follow its message's text, so it is mixed in when the message ends, into all blocks that ended in it.
//! An image, audio or a file ends the chain, because what follows is only cached if it is the same; so
//! does the limit of [`MOST`] blocks.
//!
//! The hash is not cryptographic. Each process draws a [`BlockKey`], because hashes are never compared between
//! processes: without the key nobody can construct a prompt that collides with another one.

use super::fields::TopLevelField;
use crate::json::{Literal, Nest, Scalar, unescape};
use crate::types::Dialect;

/// Bytes of a block: about eight of vLLM's blocks of 16 tokens.
pub(super) const BLOCK: usize = 512;
/// Most blocks reported: 64 kB, by which unrelated prompts have long diverged.
pub(super) const MOST: usize = 128;

/// Position of a part of the prompt in the model's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PromptSlot {
    /// Separates caches; not text of the model.
    Salt,
    Tools,
    System,
    Messages,
}

const SLOTS: usize = 4;

impl PromptSlot {
    /// The slot of a top-level member, if it has one.
    #[inline]
    pub(super) fn of(member: TopLevelField, name: &[u8]) -> Option<PromptSlot> {
        Some(match member {
            TopLevelField::Salt => PromptSlot::Salt,
            TopLevelField::Tools | TopLevelField::Functions => PromptSlot::Tools,
            TopLevelField::Words if matches!(name, b"system" | b"instructions") => PromptSlot::System,
            member if member.is_prompt() => PromptSlot::Messages,
            _ => return None,
        })
    }
}

/// Key of the block hashes.
#[derive(Clone, Copy, Debug)]
pub struct BlockKey([u64; 8]);

impl BlockKey {
    /// The key that this value makes.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        let mut last = seed;
        BlockKey(SEEDS.map(|own| {
            last = fold(last ^ own);
            own ^ last
        }))
    }

    /// The hash of at most a block. Eight lanes, because one multiplication need not wait for another.
    fn digest(&self, bytes: &[u8]) -> u64 {
        let (rows, rest) = bytes.as_chunks::<ROW>();
        let mut lanes = self.0;
        rows.iter().for_each(|row| self.take_row(&mut lanes, row));
        if !rest.is_empty() {
            let mut row = [0; ROW];
            row[..rest.len()].copy_from_slice(rest);
            self.take_row(&mut lanes, &row);
        }
        let [a, b, c, d] = [0, 2, 4, 6].map(|at| fold(lanes[at] ^ lanes[at + 1].rotate_left(21)));
        mix(a ^ b.rotate_left(21), c ^ d.rotate_left(21) ^ bytes.len() as u64)
    }

    /// Sixteen bytes into each lane. A factor of zero must not make the lane forget, so that the sum stays.
    #[inline(always)]
    fn take_row(&self, lanes: &mut [u64; 8], row: &[u8; ROW]) {
        let pairs = row.as_chunks::<16>().0;
        for ((lane, pair), own) in lanes.iter_mut().zip(pairs).zip(self.0) {
            let [one, two] = [0, 1].map(|at| u64::from_le_bytes(pair.as_chunks().0[at]));
            let (one, two) = (*lane ^ one, two ^ own.rotate_left(32));
            let product = u128::from(one) * u128::from(two);
            *lane = (product as u64) ^ ((product >> 64) as u64) ^ one.wrapping_add(two.rotate_left(17));
        }
    }
}

/// The chains of one body, while it is read.
#[derive(Debug)]
pub(super) struct Chain {
    key: BlockKey,
    is_on: bool,
    /// Whether the current slot accepts more.
    is_open: bool,
    slot: PromptSlot,
    parts: [PromptPart; SLOTS],
    /// The block that is being filled. It has its place from the first text on that is hashed.
    block: Vec<u8>,
    /// The roles of this member's messages, the present one's, and the first block without them.
    roles: u64,
    role: u64,
    unsettled: usize,
    id: u32,
}

#[derive(Debug)]
struct PromptPart {
    /// Hash of everything so far.
    hash: u64,
    blocks: Vec<u64>,
    /// Whether the chain has ended.
    is_stopped: bool,
}

impl Chain {
    pub(super) const fn new(is_on: bool) -> Self {
        const EMPTY: PromptPart = PromptPart { hash: 0, blocks: Vec::new(), is_stopped: false };
        Chain {
            key: BlockKey(SEEDS),
            is_on,
            is_open: false,
            slot: PromptSlot::Salt,
            parts: [EMPTY; SLOTS],
            block: Vec::new(),
            roles: 0,
            role: 0,
            unsettled: 0,
            id: 0,
        }
    }

    /// The hashes have this key.
    pub(super) const fn has_key(&mut self, key: BlockKey) {
        self.key = key;
    }

    /// Disables hashing: block hashes are not needed, or the body has no prompt.
    pub(super) const fn leave(&mut self) {
        (self.is_on, self.is_open) = (false, false);
    }

    /// Whether block hashes are needed and possible.
    pub(super) const fn is_on(&self) -> bool {
        self.is_on
    }

    /// Whether more bytes would change a hash.
    #[inline]
    pub(super) const fn wants(&self) -> bool {
        self.is_open
    }

    /// Begins a top-level member.
    #[inline]
    pub(super) fn begins(&mut self, slot: Option<PromptSlot>) {
        self.is_open = false;
        if let Some(slot) = slot
            && self.is_on
        {
            self.enter(slot);
        }
    }

    fn enter(&mut self, slot: PromptSlot) {
        self.end_part();
        let part = &self.parts[slot as usize];
        self.slot = slot;
        self.is_open = !part.is_stopped && part.blocks.len() < MOST;
        (self.roles, self.role, self.unsettled) = (0, 0, part.blocks.len());
    }

    /// Mixes in the incomplete last block of a slot.
    fn end_part(&mut self) {
        self.settle();
        let part = &mut self.parts[self.slot as usize];
        if !self.block.is_empty() {
            part.hash = mix(part.hash, self.key.digest(&self.block));
            self.block.clear();
        }
        if self.roles != 0 {
            part.hash = mix(part.hash, self.roles);
        }
    }

    /// Adds a piece of text, cut anywhere.
    #[inline]
    pub(super) fn push(&mut self, piece: &[u8]) {
        if !self.is_open {
            return;
        }
        if self.block.capacity() > 0 && self.block.len() + piece.len() < BLOCK {
            self.block.extend_from_slice(piece);
        } else {
            self.fill(piece);
        }
    }

    /// Adds a piece of text with two-byte escapes.
    pub(super) fn push_escaped(&mut self, raw: &[u8]) {
        if self.is_open {
            unescape(raw, |text| {
                self.push(text);
                self.is_open
            });
        }
    }

    #[inline(never)]
    fn fill(&mut self, mut piece: &[u8]) {
        self.block.reserve_exact(BLOCK - self.block.len());
        while self.is_open {
            if self.block.is_empty()
                && let Some((whole, rest)) = piece.split_first_chunk::<BLOCK>()
            {
                self.block_ends(self.key.digest(whole));
                piece = rest;
                continue;
            }
            let (head, rest) = piece.split_at(piece.len().min(BLOCK - self.block.len()));
            self.block.extend_from_slice(head);
            piece = rest;
            if self.block.len() < BLOCK {
                return;
            }
            let block = self.key.digest(&self.block);
            self.block.clear();
            self.block_ends(block);
        }
    }

    fn block_ends(&mut self, block: u64) {
        let part = &mut self.parts[self.slot as usize];
        part.hash = mix(part.hash, block);
        part.blocks.push(part.hash);
        self.is_open = part.blocks.len() < MOST;
    }

    /// Ends a text, because `ab`, `c` is another prompt than `a`, `bc`.
    #[inline]
    pub(super) fn part(&mut self) {
        if self.is_open {
            let part = &mut self.parts[self.slot as usize];
            part.hash = mix(part.hash, 1 + self.block.len() as u64);
        }
    }

    pub(super) fn push_id(&mut self, digits: &[u8]) {
        let next = |id: u32, digit: &u8| id.wrapping_mul(10).wrapping_add(u32::from(digit.wrapping_sub(b'0')));
        self.id = digits.iter().fold(self.id, next);
    }

    pub(super) fn id_ends(&mut self) {
        let id = std::mem::take(&mut self.id);
        self.push(&id.to_le_bytes());
    }

    // Tools: punctuation is represented by bytes that no text contains.

    /// Adds a member name with its quotes and colon.
    pub(super) fn name(&mut self, name: &[u8]) {
        self.push(name);
        self.push(&[0xFF; 3]);
    }

    /// Ends a string (two quotes and a comma) or a number (a comma).
    pub(super) fn scalar_ends(&mut self, what: Scalar) {
        self.push(if what == Scalar::String { &[0xFE; 3] } else { &[0xFD] });
    }

    pub(super) fn word(&mut self, word: Literal) {
        self.push(word.word().as_bytes());
        self.push(&[0xFC]);
    }

    pub(super) fn opens(&mut self, nest: Nest) {
        self.push(if nest == Nest::Object { &[0xFB] } else { &[0xFA] });
    }

    pub(super) fn closes(&mut self, nest: Nest) {
        self.push(if nest == Nest::Object { &[0xF9] } else { &[0xF8] });
    }

    // Messages.

    /// Adds the role of the current message.
    pub(super) fn role(&mut self, role: &str) {
        self.role = mix(self.role, self.key.digest(role.as_bytes().get(..BLOCK).unwrap_or(role.as_bytes())));
    }

    /// Ends a message: mixes its role into the blocks that ended in it.
    pub(super) fn message_ends(&mut self) {
        self.roles = mix(self.roles, std::mem::take(&mut self.role));
        self.settle();
    }

    fn settle(&mut self) {
        let blocks = &mut self.parts[self.slot as usize].blocks;
        for block in &mut blocks[self.unsettled..] {
            *block = fold(*block ^ self.roles);
        }
        self.unsettled = blocks.len();
    }

    /// Ends the chain, because what follows is unknown here.
    pub(super) fn stop(&mut self) {
        if self.is_on {
            self.parts[self.slot as usize].is_stopped = true;
            self.is_open = false;
        }
    }

    /// The hashes of all blocks, in the model's input order.
    pub(super) fn finish(&mut self, dialect: Dialect, model: &str) -> Vec<u64> {
        let has_blocks = self.parts[PromptSlot::Tools as usize..].iter().any(|part| !part.blocks.is_empty());
        if !self.is_on || !has_blocks {
            return Vec::new();
        }
        self.end_part();
        let mut front =
            model.as_bytes().chunks(BLOCK).fold(dialect as u64, |hash, chunk| mix(hash, self.key.digest(chunk)));
        let mut all = Vec::new();
        for (slot, part) in self.parts.iter_mut().enumerate() {
            if slot != PromptSlot::Salt as usize {
                part.blocks.iter_mut().for_each(|block| *block = fold(front ^ *block));
                if all.is_empty() {
                    all = std::mem::take(&mut part.blocks);
                } else {
                    let room = MOST - all.len();
                    all.extend(part.blocks.iter().take(room));
                }
            }
            if part.is_stopped || all.len() == MOST {
                break;
            }
            front = mix(front, part.hash);
        }
        all
    }
}

const ROW: usize = 128;
const SEEDS: [u64; 8] = [
    0xA076_1D64_78BD_642F,
    0xE703_7ED1_A0B4_28DB,
    0x8EBC_6AF0_9C88_C6E3,
    0x5899_65CC_7537_4CC3,
    0x1D8E_4E27_C47D_124F,
    0xEB44_ACCA_B455_D165,
    0x9C6E_6877_736C_46E3,
    0xAAAA_AAAA_AAAA_AAAB,
];

/// One hash behind another.
fn mix(hash: u64, next: u64) -> u64 {
    fold(fold(hash ^ 0xA076_1D64_78BD_642F) ^ next)
}

/// Multiplies to 128 bits and folds the halves, so that every input bit affects every output
/// bit.
pub(super) fn fold(word: u64) -> u64 {
    let product = u128::from(word) * 0x9E37_79B9_7F4A_7C15;
    (product as u64) ^ ((product >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use serde_json::{Value, json};

    use super::*;
    use crate::inspect::{Facts, PromptHashes, Scanner};
    use crate::types::ApiPath;

    const CHAT: &str = "/v1/chat/completions";

    fn facts(path: &str, body: &str) -> Facts {
        let mut scanner = Scanner::new(ApiPath::relayed(path).unwrap());
        scanner.push(body.as_bytes()).unwrap();
        *scanner.finish().unwrap()
    }

    fn blocks(path: &str, body: &str) -> Vec<u64> {
        facts(path, body).prefix_blocks().to_vec()
    }

    /// Text without repetition.
    fn text(name: &str, length: usize) -> String {
        let mut text: String = (0..length / 8 + 1).map(|n| format!("{name} {n:07} \n\"é")).collect();
        while text.len() > length {
            text.pop();
        }
        text.push_str(&".".repeat(length - text.len()));
        text
    }

    fn said(role: &str, content: impl Into<Value>) -> Value {
        json!({"role": role, "content": content.into()})
    }

    fn chat(messages: &[Value]) -> Vec<u64> {
        blocks(CHAT, &json!({"model": "m", "messages": messages}).to_string())
    }

    fn shared(a: &[u64], b: &[u64]) -> usize {
        a.iter().zip(b).take_while(|(a, b)| a == b).count()
    }

    #[test]
    fn under_another_key_every_block_has_another_hash() {
        let body = json!({"model": "m", "prompt": text("a", 5000)}).to_string();
        let under = |seed| {
            let mut scanner = Scanner::new(ApiPath::relayed("/v1/completions").unwrap());
            scanner.has_key(BlockKey::of(seed));
            scanner.push(body.as_bytes()).unwrap();
            scanner.finish().unwrap().prefix_blocks
        };
        let all: HashSet<u64> = (0..100).flat_map(under).collect();
        assert_eq!((all.len(), under(7)), (9 * 100, under(7)));
        assert!(BlockKey::of(7).0.iter().zip(SEEDS).all(|(own, known)| *own != known));
    }

    #[test]
    fn a_block_is_512_bytes_and_the_rest_is_ignored() {
        for (length, count) in [(0, 0), (511, 0), (512, 1), (1023, 1), (1024, 2), (65_535, 127), (65_536, 128)] {
            let body = json!({"model": "m", "prompt": text("a", length)}).to_string();
            assert_eq!(blocks("/v1/completions", &body).len(), count, "{length}");
        }
        let none = facts(CHAT, &json!({"messages": [said("user", text("a", 511))]}).to_string());
        assert_eq!(none.prefix_blocks.capacity(), 0);
    }

    #[test]
    fn beyond_64_kilobytes_the_last_hash_is_kept() {
        let (long, longer) = (text("a", 65_536), text("a", 65_536) + &text("b", 900_000));
        let longer = chat(&[said("user", longer)]);
        assert_eq!(longer.len(), MOST);
        assert_eq!(chat(&[said("user", long)]), longer);
    }

    #[test]
    fn a_conversation_that_grows_keeps_its_blocks() {
        let mut messages = vec![said("system", text("s", 1500))];
        let mut before: Vec<u64> = Vec::new();
        let mut bytes = 1500;
        for turn in 0..40 {
            let role = ["user", "assistant"][turn % 2];
            let length = 100 + 37 * turn;
            messages.push(said(role, text(&format!("turn {turn}"), length)));
            bytes += length;
            let now = chat(&messages);
            assert_eq!(now.len(), (bytes / BLOCK).min(MOST));
            assert_eq!(shared(&before, &now), before.len(), "turn {turn}");
            before = now;
        }
    }

    #[test]
    fn hashes_differ_from_the_first_difference_on() {
        let one = text("a", 20 * BLOCK);
        let all = chat(&[said("user", one.as_str())]);
        for at in [0, 1, 511, 512, 5 * BLOCK + 7, 20 * BLOCK - 1] {
            let mut other = one.clone().into_bytes();
            other[at] = b'~';
            let other = String::from_utf8_lossy(&other).into_owned();
            let other = chat(&[said("user", other)]);
            assert_eq!(shared(&all, &other), at / BLOCK, "{at}");
            assert!(other[at / BLOCK..].iter().all(|hash| !all.contains(hash)));
        }
    }

    #[test]
    fn another_spelling_of_the_same_request_has_the_same_blocks() {
        let (system, user) = (text("s", 900), text("u", 3000));
        let tools = json!([{"type": "function", "function": {"name": "f", "description": text("t", 700),
            "strict": true, "parameters": {"x": [1, -2.5, null, {}]}}}]);
        let plain = json!({"messages": [said("system", system.as_str()), said("user", user.as_str())],
            "model": "m", "stream": true, "tools": tools});
        let expected = blocks(CHAT, &plain.to_string());
        assert!(expected.len() >= (700 + 900 + 3000) / BLOCK - 1, "{}", expected.len());
        // With spaces, tools first, roles last, content in parts, all escaped.
        let pretty = serde_json::to_string_pretty(&plain).unwrap();
        let escaped = |text: &str| text.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect::<String>();
        let turned = format!(
            r#"{{ "tools" : {}, "model":"m", "max_tokens":9,
            "mess\u0061ges" : [ {{"content":"{}","rol\u0065":"\u0073ystem"}},
            {{"content":[{{"text":"{}", "type":"text"}}], "role":"user" }} ] }}"#,
            serde_json::to_string_pretty(&tools).unwrap().replace("function", "funct\\u0069on"),
            escaped(&system),
            escaped(&user)
        );
        for body in [&pretty, &turned] {
            assert_eq!(blocks(CHAT, body), expected, "{}", &body[..200]);
        }
        for cut in [1, 2, 3, 5, 7, 64, 700, 100_000] {
            let mut scanner = Scanner::new(ApiPath::relayed(CHAT).unwrap());
            // Two decoding paths: the tokenizer decodes where the head's hash is needed.
            if cut % 2 == 0 {
                scanner.hash_only(PromptHashes { head: false, blocks: true });
            }
            turned.as_bytes().chunks(cut).for_each(|piece| scanner.push(piece).unwrap());
            assert_eq!(scanner.finish().unwrap().prefix_blocks(), expected, "{cut}");
        }
    }

    #[test]
    fn a_different_beginning_changes_all_blocks() {
        let user = said("user", text("u", 2000));
        let body = |more: Value| {
            let mut body = json!({"model": "m", "messages": [user]});
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            blocks(CHAT, &body.to_string())
        };
        let plain = body(json!({}));
        assert_eq!(plain.len(), 3);
        let same = [
            json!({"temperature": 1, "user": "u", "metadata": {"a": "b"}}),
            json!({"tools": null}),
            json!({"tools": []}),
        ];
        same.into_iter().for_each(|more| assert_eq!(body(more.clone()), plain, "{more}"));
        let tool = |name: &str| json!([{"type": "function", "function": {"name": name}}]);
        let others = [
            json!({"model": "n"}),
            json!({"model": null}),
            json!({"cache_salt": "a"}),
            json!({"cache_salt": "b"}),
            json!({"tools": tool("f")}),
            json!({"tools": tool("g")}),
            json!({"tools": [{"type": "function", "function": {"name": "f", "strict": true}}]}),
            json!({"tools": [{"type": "function", "function": {"name": "f", "strict": null}}]}),
            json!({"system": "s"}),
        ];
        let others: Vec<_> = others.into_iter().map(body).collect();
        for other in &others {
            assert_eq!((other.len(), shared(other, &plain)), (3, 0));
        }
        assert_eq!(others.iter().map(|blocks| blocks[0]).collect::<HashSet<_>>().len(), others.len());
        let messages = json!({"model": "m", "messages": [user]}).to_string();
        assert_eq!(shared(&plain, &blocks("/v1/messages", &messages)), 0, "another kind of endpoint");
    }

    #[test]
    fn roles_and_boundaries_of_texts_tell_prompts_apart() {
        let (one, two) = (text("a", 600), text("b", 1000));
        let all = [
            chat(&[said("user", one.as_str()), said("user", two.as_str())]),
            chat(&[said("user", one.as_str()), said("assistant", two.as_str())]),
            chat(&[said("system", one.as_str()), said("user", two.as_str())]),
            chat(&[said("user", format!("{one}{two}"))]),
            chat(&[json!({"content": one}), json!({"content": two})]),
        ];
        for (i, one) in all.iter().enumerate() {
            assert_eq!(one.len(), 3);
            for other in &all[..i] {
                assert!(shared(one, other) <= 1 && one[2] != other[2]);
            }
        }
        assert_eq!(shared(&all[0], &all[1]), 1, "the first message is the same");
        assert_eq!(shared(&all[0], &all[2]), 0);
    }

    #[test]
    fn tools_and_system_prompt_stand_in_front_wherever_the_body_has_them() {
        let tools = json!([{"name": "f", "description": text("t", 1000)}]);
        let system = json!([{"type": "text", "text": text("s", 1000)}]);
        let messages = |turn: &str| json!([said("user", text(turn, 1000))]);
        let body = |members: [(&str, &Value); 3]| {
            let members: Vec<String> = members.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
            blocks("/v1/messages", &format!("{{\"model\":\"m\",{}}}", members.join(",")))
        };
        let (one, two) = (messages("one"), messages("two"));
        let first = body([("tools", &tools), ("system", &system), ("messages", &one)]);
        let last = body([("messages", &one), ("system", &system), ("tools", &tools)]);
        assert_eq!((first.len(), &first), (4, &last));
        let other = body([("system", &system), ("messages", &two), ("tools", &tools)]);
        assert_eq!(shared(&first, &other), 3, "all of tools and system are shared");
        let bare = body([("system", &system), ("messages", &two), ("x", &tools)]);
        assert_eq!(shared(&bare, &other), 0);
        // The blocks of tools alone also end after 64 kB.
        let long = json!([{"name": "f", "description": text("t", 100_000)}]);
        let long = body([("messages", &one), ("system", &system), ("tools", &long)]);
        assert_eq!(long.len(), MOST);
    }

    #[test]
    fn the_bytes_of_tools_are_about_those_of_their_json() {
        let tool = |n: usize| {
            json!({"type": "function", "function": {"name": format!("f{n}"), "description": "what it is for",
                "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"], "additionalProperties": false}}})
        };
        let tools: Vec<Value> = (0..100).map(tool).collect();
        let body = json!({"model": "m", "tools": tools});
        let raw = body["tools"].to_string().len();
        let count = blocks(CHAT, &body.to_string()).len() * BLOCK;
        assert!(count <= raw && count > raw * 9 / 10, "{count} of {raw}");
    }

    #[test]
    fn blocks_end_at_the_first_image_and_where_an_earlier_answer_is_in_front() {
        let image = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
        let part = |text: String| json!({"type": "text", "text": text});
        let with = |url: &str| {
            let parts = json!([part(text("a", 1100)), image(url), part(text("b", 2000))]);
            chat(&[said("user", parts), said("assistant", text("c", 2000))])
        };
        assert_eq!((with("x").len(), with("x")), (2, with("y")));
        assert_eq!(shared(&with("x"), &chat(&[said("user", text("a", 5000))])), 2);
        // The form that SDKs send for a response without calls.
        let none = json!({"role": "assistant", "content": text("a", 2000), "audio": null, "refusal": null});
        assert_eq!(chat(&[none]).len(), 3);
        let follows = |id: Value| {
            let body = json!({"model": "m", "input": text("a", 2000), "previous_response_id": id});
            blocks("/v1/responses", &body.to_string()).len()
        };
        assert_eq!((follows(json!("r1")), follows(Value::Null)), (0, 3));
    }

    #[test]
    fn token_ids_are_four_bytes_each() {
        let ids = |count: usize, last: u32| {
            let ids: Vec<u32> = (0..count as u32 - 1).map(|n| 7 * n).chain([last]).collect();
            json!({"model": "m", "prompt": ids}).to_string()
        };
        let all = blocks("/v1/completions", &ids(300, 1));
        assert_eq!(all.len(), 2);
        assert_eq!(shared(&all, &blocks("/v1/completions", &ids(256, 1))), 1);
        assert_eq!(shared(&all, &blocks("/v1/completions", &ids(900, 1))), 2);
        let nested = json!({"model": "m", "prompt": [(0..150).collect::<Vec<u32>>(), vec![1u32; 20]]}).to_string();
        let flat = nested.replace("],[", ",");
        assert_ne!(
            blocks("/v1/completions", &nested),
            blocks("/v1/completions", &flat.replace("[[", "[").replace("]]", "]"))
        );
    }

    #[test]
    fn several_prompts_are_blocks_in_their_order() {
        let prompts =
            |prompts: &[String]| blocks("/v1/completions", &json!({"model": "m", "prompt": prompts}).to_string());
        let (a, b) = (text("a", 1100), text("b", 1100));
        let (one, both) = (prompts(std::slice::from_ref(&a)), prompts(&[a.clone(), b.clone()]));
        assert_eq!((one.len(), both.len(), shared(&one, &both)), (2, 4, 2));
        assert_eq!(shared(&both, &prompts(&[b, a])), 0);
    }

    #[test]
    fn only_generating_paths_have_blocks_and_only_if_needed() {
        let long = text("a", 5000);
        for path in ["/v1/embeddings", "/tokenize", "/v1/rerank"] {
            assert!(blocks(path, &json!({"input": long, "prompt": long}).to_string()).is_empty());
        }
        let body = json!({"prompt": long}).to_string();
        let mut scanner = Scanner::new(ApiPath::relayed("/v1/completions").unwrap());
        scanner.hash_only(PromptHashes { head: true, blocks: false });
        scanner.push(body.as_bytes()).unwrap();
        let expected = Facts { prefix_blocks: Vec::new(), ..facts("/v1/completions", &body) };
        assert_eq!(*scanner.finish().unwrap(), expected);
        assert_ne!(expected.prefix_hash, 0);
    }

    #[test]
    fn a_member_that_is_repeated_holds_no_more_than_one() {
        let long = format!("\"messages\":[{}],\"system\":\"{}\",", said("user", text("a", 70_000)), "s".repeat(70_000));
        let body = format!("{{{}\"model\":\"m\"}}", long.repeat(20));
        let mut scanner = Scanner::new(ApiPath::relayed("/v1/messages").unwrap());
        scanner.push(body.as_bytes()).unwrap();
        let facts = scanner.finish().unwrap();
        assert_eq!((facts.prefix_blocks().len(), facts.prefix_blocks.capacity()), (MOST, MOST));
    }

    #[test]
    fn without_a_key_hashes_are_the_same_for_ever_and_spread() {
        assert_eq!(chat(&[said("user", "x".repeat(512))]), [FOR_EVER]);
        let all: HashSet<u64> = (0..10_000u64).map(|n| BlockKey(SEEDS).digest(&n.to_le_bytes()) >> 44).collect();
        assert!(all.len() > 9_900, "{}", all.len());
        let all: HashSet<u64> = (0..=BLOCK).map(|n| BlockKey(SEEDS).digest(&vec![0; n])).collect();
        assert_eq!(all.len(), BLOCK + 1);
    }

    const FOR_EVER: u64 = 716_240_593_189_631_435;
}
