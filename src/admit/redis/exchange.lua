-- The reports of all gateways. One hash with a field per gateway: the time of its report by this server in us, and
-- the record.
--
-- KEYS[1]  the hash; its field `key` is a random number, the same for all while the hash lives
-- ARGV     gateway, record (empty: none), life in us, a random number
-- Returns  `key`, then for each other gateway: name, age of its record in us, its record

local GATEWAY, RECORD, LIFE, RANDOM = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
if RECORD ~= '' then
  redis.call('HSET', KEYS[1], GATEWAY, string.format('%.0f', now) .. ' ' .. RECORD)
end
local heard, key = {''}, nil
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  if all[i] == 'key' then
    key = all[i + 1]
  elseif all[i] ~= GATEWAY then
    local told, record = string.match(all[i + 1], '^(%d+) (.*)$')
    local age = told and now - tonumber(told)
    if not age or age > LIFE or age < 0 then
      redis.call('HDEL', KEYS[1], all[i])
    else
      heard[#heard + 1] = all[i]
      heard[#heard + 1] = string.format('%.0f', age)
      heard[#heard + 1] = record
    end
  end
end
if not key then
  key = RANDOM
  redis.call('HSET', KEYS[1], 'key', key)
end
redis.call('PEXPIRE', KEYS[1], 60000)
heard[1] = key
return heard
