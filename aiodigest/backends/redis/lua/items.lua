-- Shared by close and retry: reading the items of a call, and answering each.
--
-- ARGV[3]  nonce for what the items are to name
-- ARGV[4]  number of the first item in the caller's request, from 1
-- then     the items, of any number of arguments each

local cursor = 5

local function next_argument()
  cursor = cursor + 1
  return ARGV[cursor - 1]
end

local function next_number()
  return tonumber(next_argument())
end

local function next_flag()
  return next_argument() == '1'
end

-- A number of record ids, and these, as a set; or nil if the number is -1: all records.
local function next_ids()
  local length = next_number()
  if length < 0 then
    return nil
  end
  local ids = {}
  for _ = 1, length do
    ids[next_argument()] = true
  end
  return ids
end

-- Answer item after item, until enough has been read.
local function answer_each(next_item, transition)
  local answers = {}
  local number = tonumber(ARGV[4])
  while cursor <= #ARGV and scanned < SLICE do
    answers[#answers + 1] = transition(next_item(), ARGV[3] .. '-' .. whole(number))
    number = number + 1
  end
  finish()
  return answers
end
