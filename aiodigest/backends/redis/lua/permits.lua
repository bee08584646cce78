-- permits: tell which commands the user may not run, so that no script is refused half-way, after its first writes.
--
-- Flags     repeatable
-- Reply     [text...]
-- KEYS[1]   key (key): one that nothing else uses
-- ARGV      commands, each with arguments in TRIES
-- Returns   those that are refused

local key = KEYS[1]

-- What each command is tried with: there is no such key, so nothing comes of it.
local TRIES = {
  EXISTS = {}, HDEL = {'field'}, HGET = {'field'}, HGETALL = {}, HINCRBY = {'field', 'no number'}, HMGET = {'field'},
  HLEN = {}, HSET = {'field', 'value', 'field without a value'}, HSETNX = {'field', 'value'}, LLEN = {},
  LPUSH = {'entry'}, LRANGE = {0, 0}, LTRIM = {0, 0}, PERSIST = {}, PEXPIRE = {1}, RENAME = {key}, RPUSH = {'entry'},
  UNLINK = {}, XADD = {'NOMKSTREAM', '*', 'at', 0}, XREVRANGE = {'+', '-'}, ZADD = {'XX', 0, 'member'}, ZCARD = {},
  ZCOUNT = {0, 0}, ZMSCORE = {'member'}, ZRANDMEMBER = {}, ZRANGE = {0, 0}, ZRANGEBYSCORE = {0, 0}, ZREM = {'member'},
  ZREMRANGEBYRANK = {0, 0}, ZSCORE = {'member'},
}

local function is_refused(command, ...)
  local answer = redis.pcall(command, ...)
  local problem = type(answer) == 'table' and answer.err or ''
  for _, words in ipairs({'NOPERM', 'ACL failure in script', "The user executing the script can't"}) do
    if string.find(problem, words, 1, true) then
      return true
    end
  end
end

local refused = {}
for _, command in ipairs(ARGV) do
  local pushes = command == 'LPUSH' or command == 'RPUSH' or command == 'HSETNX' -- the only ones that leave a key
  if command == 'TIME' then
    refused[#refused + 1] = is_refused(command) and command or nil
  elseif not pushes or not is_refused('UNLINK', key) then
    refused[#refused + 1] = is_refused(command, key, unpack(TRIES[command])) and command or nil
    if pushes then
      redis.pcall('UNLINK', key)
    end
  end
end
return refused
