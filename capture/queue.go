package capture

import "time"

// waiting is a RoCE packet that cannot be dealt with yet.
type waiting struct {
	pk   RoCE // Payload is a copy
	when time.Time
}

// maxSpare is for how many packets that wait a connection keeps room.
const maxSpare = 64

// packetQueue holds packets that wait, in the order of their PSNs.
type packetQueue struct {
	items []waiting
	head  int
}

func (q *packetQueue) len() int          { return len(q.items) - q.head }
func (q *packetQueue) at(i int) *waiting { return &q.items[q.head+i] }
func (q *packetQueue) first() *waiting   { return q.at(0) }

// add copies pk into the queue. added is false if a packet with the same PSN and opcode is
// there already, or if there is no memory for the copy. room is false only for lack of
// memory.
func (q *packetQueue) add(r *Reassembler, pk *RoCE, when time.Time) (added, room bool) {
	i := len(q.items)
	for ; i > q.head; i-- {
		d := psnDiff(pk.PSN, q.items[i-1].pk.PSN)
		if d == 0 && pk.Opcode == q.items[i-1].pk.Opcode {
			return false, true
		}
		if d >= 0 {
			break
		}
	}
	payload, ok := r.hold(pk.Payload)
	if !ok {
		return false, false
	}
	if q.head > 0 && len(q.items) == cap(q.items) {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items = q.items[:n]
		i -= q.head
		q.head = 0
	}
	q.items = append(q.items, waiting{})
	copy(q.items[i+1:], q.items[i:])
	q.items[i] = waiting{*pk, when}
	q.items[i].pk.Payload = payload
	return true, true
}

// pop takes the first packet out. Its payload is to be let go of.
func (q *packetQueue) pop() waiting {
	w := q.items[q.head]
	q.items[q.head] = waiting{}
	if q.head++; q.head == len(q.items) {
		if q.items, q.head = q.items[:0], 0; cap(q.items) > maxSpare {
			q.items = nil
		}
	}
	return w
}

// remove takes the packet at i out.
func (q *packetQueue) remove(i int) waiting {
	if i == 0 {
		return q.pop()
	}
	i += q.head
	w := q.items[i]
	n := copy(q.items[i:], q.items[i+1:]) + i
	q.items[n] = waiting{}
	q.items = q.items[:n]
	return w
}

func (q *packetQueue) clear(r *Reassembler) {
	for q.len() > 0 {
		w := q.pop()
		r.letGo(w.pk.Payload)
	}
	q.items = nil
}
