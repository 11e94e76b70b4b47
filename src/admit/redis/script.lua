-- The books of one tenant, for all gateways. Runs whole or not at all: everything is read and
-- checked before the first write.
--
-- KEYS[1]  a hash, the tenant's:
--   v           layout of this hash
--   b           when it was begun: another value than remembered means that it was lost
--   <limit>     a bucket: "whole micros as_of": what is spent, in tokens and in the microseconds
--               that a rate of one a minute needs for the rest; the server's time then
--   <places>    "gateway count until;" for each gateway: requests that run there
--   lost/<limit>  as a bucket: what gateways remembered of books that were lost
--   seen        "gateway mark until;" for each gateway: its last call
-- ARGV  layout, gateway, life of the key in ms, life of a count in us, mark of this call, mark of
--       the last one known to be made (0: none) and b then, life of a mark in us, number of
--       buckets, number of places; then
--   for each bucket: field, rate a minute, burst, given back, owed, wanted, wanted besides,
--                    b as remembered (0: nothing), used here while the store was away,
--                    spent by then (counted where b is another, as far as nobody has told it yet)
--   for each place:  field, most, running here, wanted, wanted besides
-- Returns  granted (1 or 0), now in us, b; then for each bucket: whole, micros, granted besides;
--          for each place: count that is granted to this gateway, count of the others
--
-- Numbers are doubles, exact up to 2^53, and no step leaves that range unnoticed: fmod is exact,
-- and products are split so that each stays below.

local MOST, MINUTE = 9007199254740992, 60000000
local LAYOUT, GATEWAY = ARGV[1], ARGV[2]
local key_life, count_life = ARGV[3], tonumber(ARGV[4])
local mark, known, known_begun, mark_life = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local buckets, places = tonumber(ARGV[9]), tonumber(ARGV[10])
local FIRST, OF_BUCKET, OF_PLACE = 11, 10, 5

local function text(number) return string.format('%.0f', number) end
-- The number that these digits are, if a double holds it and we would have written it so.
local function exact(digits)
    local number = tonumber(digits)
    if number <= MOST and text(number) == digits then return number end
end
local function nonsense(field) return redis.error_reply('GOODPUT what is kept under ' .. field .. ' is not ours') end

local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])

local fields, at = { 'v', 'b', 'seen' }, FIRST
local BEFORE = #fields
for _ = 1, buckets do fields[#fields + 1] = ARGV[at]; at = at + OF_BUCKET end
for _ = 1, places do fields[#fields + 1] = ARGV[at]; at = at + OF_PLACE end
local kept = redis.call('HMGET', KEYS[1], unpack(fields))

local layout, begun = kept[1], kept[2]
if layout and layout ~= LAYOUT then return redis.error_reply('GOODPUT another layout: ' .. string.sub(layout, 1, 20)) end
if begun and not (string.match(begun, '^%d+$') and exact(begun)) then return nonsense('b') end

-- A gateway that finds less than the mark it wrote has older books before it: they begin anew.
local seen = {}
if string.gsub(kept[3] or '', '%w+ %d+ %d+;', '') ~= '' then return nonsense('seen') end
local own = 0
for gateway, count, till in string.gmatch(kept[3] or '', '(%w+) (%d+) (%d+);') do
    count, till = exact(count), exact(till)
    if not (count and till) then return nonsense('seen') end
    till = math.min(till, now + mark_life)
    if gateway == GATEWAY then
        own = count
    elseif till > now then
        seen[#seen + 1] = gateway .. ' ' .. text(count) .. ' ' .. text(till) .. ';'
    end
end
if own < known and begun == known_begun then begun = nil end
if mark > 0 then
    local till = now + math.min(mark_life, tonumber(key_life) * 1000)
    -- A call that was given up may come late.
    seen[#seen + 1] = GATEWAY .. ' ' .. text(math.max(own, mark)) .. ' ' .. text(till) .. ';'
end
begun = begun or text(now)

-- What flowed off since as_of. A clock that was set back begins anew from here.
local function flow(bucket)
    local passed = math.max(0, now - bucket.as_of)
    local rest = math.fmod(passed, MINUTE)
    local minutes = (passed - rest) / MINUTE
    local slow = math.fmod(bucket.rate, MINUTE)
    local fast = (bucket.rate - slow) / MINUTE
    local micros = math.fmod(slow * rest, MINUTE)
    local whole = minutes * bucket.rate + fast * rest + (slow * rest - micros) / MINUTE
    bucket.whole, bucket.micros = bucket.whole - whole, bucket.micros - micros
    if bucket.micros < 0 then bucket.whole, bucket.micros = bucket.whole - 1, bucket.micros + MINUTE end
    if bucket.whole < 0 then bucket.whole, bucket.micros = 0, 0 end
end

local function give_back(bucket, tokens)
    bucket.whole = bucket.whole - tokens
    if bucket.whole < 0 then bucket.whole, bucket.micros = 0, 0 end
end

local function charge(bucket, tokens)
    bucket.whole = math.min(bucket.whole + tokens, MOST)
    if bucket.whole == MOST then bucket.micros = 0 end
end

-- Whole tokens that fit beside what is spent and `need`; negative: it does not fit.
local function room(bucket, need)
    local left = bucket.burst - bucket.whole - need
    if bucket.micros > 0 then left = left - 1 end
    return left
end

-- Reads what is kept of a bucket, up to now; nil if it is not ours.
local function read(bucket, value)
    if not value then return bucket end
    local whole, micros, as_of = string.match(value, '^(%d+) (%d+) (%d+)$')
    if not whole then return nil end
    whole, micros, as_of = exact(whole), exact(micros), exact(as_of)
    if not (whole and micros and as_of) or micros >= MINUTE then return nil end
    bucket.whole, bucket.micros, bucket.as_of = whole, micros, as_of
    bucket.is_older = as_of < tonumber(begun)
    flow(bucket)
    return bucket
end

-- What was spent in books that are gone, as a gateway remembers it. Others may have told a part, or
-- older books have it.
local function remember(bucket, remembered)
    local lost = { rate = bucket.rate, whole = 0, micros = 0, as_of = now }
    if bucket.is_older then
        lost.whole, lost.micros = bucket.whole, bucket.micros
    elseif not read(lost, redis.call('HMGET', KEYS[1], 'lost/' .. bucket.field)[1]) then
        return false
    end
    local told = lost.whole
    if lost.micros > 0 then told = told + 1 end
    if remembered > told then charge(bucket, remembered - told) end
    if bucket.is_older or remembered > told then bucket.lost = math.max(remembered, told) end
    return true
end

local all_fit = true
local read_buckets, read_places = {}, {}
at = FIRST
for i = 1, buckets do
    local bucket = {
        field = ARGV[at], rate = tonumber(ARGV[at + 1]), burst = tonumber(ARGV[at + 2]),
        need = tonumber(ARGV[at + 5]), besides = tonumber(ARGV[at + 6]), whole = 0, micros = 0, as_of = now,
    }
    if not read(bucket, kept[BEFORE + i]) then return nonsense(bucket.field) end
    local birth, remembered = ARGV[at + 7], 0
    if birth ~= '0' and birth ~= begun then remembered = tonumber(ARGV[at + 9]) end
    if (remembered > 0 or bucket.is_older) and not remember(bucket, remembered) then
        return nonsense('lost/' .. bucket.field)
    end
    charge(bucket, tonumber(ARGV[at + 8]))
    give_back(bucket, tonumber(ARGV[at + 3]))
    charge(bucket, tonumber(ARGV[at + 4]))
    if bucket.need > 0 and room(bucket, bucket.need) < 0 then all_fit = false end
    read_buckets[i] = bucket
    at = at + OF_BUCKET
end

for i = 1, places do
    local place = {
        field = ARGV[at], most = tonumber(ARGV[at + 1]), running = tonumber(ARGV[at + 2]),
        need = tonumber(ARGV[at + 3]), besides = tonumber(ARGV[at + 4]), others = 0, kept = {},
    }
    local value = kept[BEFORE + buckets + i] or ''
    if string.gsub(value, '%w+ %d+ %d+;', '') ~= '' then return nonsense(place.field) end
    for gateway, count, till in string.gmatch(value, '(%w+) (%d+) (%d+);') do
        count, till = exact(count), exact(till)
        if not (count and till) then return nonsense(place.field) end
        -- Nobody's count outlives its life, even where the clock was set back.
        till = math.min(till, now + count_life)
        if gateway ~= GATEWAY and till > now then
            place.others = math.min(place.others + count, MOST)
            place.kept[#place.kept + 1] = gateway .. ' ' .. text(count) .. ' ' .. text(till) .. ';'
        end
    end
    place.room = place.most - place.others - place.running
    if place.need > 0 and place.room < place.need then all_fit = false end
    read_places[i] = place
    at = at + OF_PLACE
end

local reply = { all_fit and 1 or 0, now, tonumber(begun) }
local writes = { 'v', LAYOUT, 'b', begun, 'seen', table.concat(seen) }
for _, bucket in ipairs(read_buckets) do
    local besides = 0
    if all_fit then
        besides = math.max(0, math.min(bucket.besides, room(bucket, bucket.need)))
        charge(bucket, bucket.need + besides)
    end
    writes[#writes + 1] = bucket.field
    writes[#writes + 1] = text(bucket.whole) .. ' ' .. text(bucket.micros) .. ' ' .. text(now)
    if bucket.lost then
        writes[#writes + 1] = 'lost/' .. bucket.field
        writes[#writes + 1] = text(bucket.lost) .. ' 0 ' .. text(now)
    end
    reply[#reply + 1] = bucket.whole
    reply[#reply + 1] = bucket.micros
    reply[#reply + 1] = besides
end
for _, place in ipairs(read_places) do
    local count = place.running
    if all_fit then count = count + math.max(0, math.min(place.need + place.besides, place.room)) end
    if count > 0 then
        place.kept[#place.kept + 1] = GATEWAY .. ' ' .. text(count) .. ' ' .. text(now + count_life) .. ';'
    end
    writes[#writes + 1] = place.field
    writes[#writes + 1] = table.concat(place.kept)
    reply[#reply + 1] = count
    reply[#reply + 1] = place.others
end
redis.call('HSET', KEYS[1], unpack(writes))
redis.call('PEXPIRE', KEYS[1], key_life)
return reply
