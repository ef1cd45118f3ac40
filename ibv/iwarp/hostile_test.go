package iwarp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// An attack is what a peer does that it must not do, on a connection that is
// all set up, and what must come of it.
type attack struct {
	name string
	crc  bool
	make func(v *victim, p *rawPeer) []byte // what to send

	want    *iwarpwire.TermError // told to the peer, and the reason in the event
	request bool                 // the Terminate names the Read Request too
	placed  int                  // bytes of memory that may change: those of frames that were in order

	// How posted work ends, where it is not flushed: by ID.
	status map[uint64]ibv.WCStatus
	read   bool // there is an RDMA Read among it
}

// bytesOf are n bytes of a hostile peer.
func bytesOf(n int) []byte { return bytes.Repeat([]byte{hostile}, n) }

// changed is an attack by a segment with some of its octets replaced.
func changed(ulpdu []byte, at int, with ...byte) func(*victim, *rawPeer) []byte {
	b := bytes.Clone(ulpdu)
	copy(b[at:], with)
	return func(*victim, *rawPeer) []byte { return seal(false, b) }
}

// sent is an attack by segments that need nothing of the victim.
func sent(ulpdus ...[]byte) func(*victim, *rawPeer) []byte {
	var b []byte
	for _, u := range ulpdus {
		b = append(b, seal(false, u)...)
	}
	return func(*victim, *rawPeer) []byte { return b }
}

// onto is an attack by an RDMA Write of n bytes at an offset of a region.
func onto(region func(m *memory) ibv.MR, offset int64, n int) func(*victim, *rawPeer) []byte {
	return func(v *victim, _ *rawPeer) []byte {
		mr := region(v.mem)
		return seal(false, writeOf(mr.RKey(), mr.Addr()+uint64(offset), bytesOf(n)))
	}
}

// from is an attack by an RDMA Read of n bytes at an offset of a region.
func from(region func(m *memory) ibv.MR, offset int64, n uint32) func(*victim, *rawPeer) []byte {
	return func(v *victim, _ *rawPeer) []byte {
		mr := region(v.mem)
		return seal(false, readOf(1, iwarpwire.ReadReq{SinkSTag: 1, Size: n, SrcSTag: mr.RKey(), SrcTO: mr.Addr() + uint64(offset)}))
	}
}

// answer is an attack by Read Responses to a Read of 64 bytes.
func answer(make func(stag uint32, to uint64) [][]byte) func(*victim, *rawPeer) []byte {
	return func(v *victim, p *rawPeer) []byte {
		stag, to := v.read(recvLen)
		h, _ := p.frame()
		require.Equal(v.t, iwarpwire.ReadRequest, h.Op)
		var b []byte
		for _, u := range make(stag, to) {
			b = append(b, seal(false, u)...)
		}
		return b
	}
}

// neighboursRegion belongs to another queue pair in the victim's domain, open to
// that one's peer in every way.
func (v *victim) neighboursRegion() ibv.MR {
	id := &id{dev: v.mem.pd.(*pd).dev}
	q, err := id.CreateQP(v.mem.pd, ibv.QPInit{SendCQ: v.cq, RecvCQ: v.cq})
	require.NoError(v.t, err)
	buf := make([]byte, regionLen)
	region, err := q.RegMR(buf, ibv.AccessLocalWrite|ibv.AccessRemoteRead|ibv.AccessRemoteWrite)
	require.NoError(v.t, err)
	v.beside = append(v.beside, func() {
		require.Equal(v.t, make([]byte, regionLen), buf)
		require.False(v.t, region.(*mr).dead, "the neighbour's key was taken back")
		require.NoError(v.t, q.Close())
		require.NoError(v.t, region.Close())
		require.NoError(v.t, id.Close())
	})
	return region
}

func local(m *memory) ibv.MR   { return m.local }
func both(m *memory) ibv.MR    { return m.both }
func forRead(m *memory) ibv.MR { return m.read }
func forWrit(m *memory) ibv.MR { return m.write }

// control is the segment header with opcode and queue as given.
func control(op iwarpwire.Opcode, qn, msn, mo uint32, last bool, payload []byte) []byte {
	return segmentOf(iwarpwire.Header{Op: op, QN: qn, MSN: msn, MO: mo, Last: last}, payload)
}

func attacks() []attack {
	good := sendOf(1, 0, true, bytesOf(8))
	write := writeOf(1, 0, bytesOf(8))
	readReq := readOf(1, iwarpwire.ReadReq{})
	lenErr := map[uint64]ibv.WCStatus{0: ibv.WCLocLenErr}
	badRead := map[uint64]ibv.WCStatus{readID: ibv.WCBadRespErr}

	list := []attack{
		// MPA: CRC and length.
		{name: "CRC wrong", crc: true, want: iwarpwire.ErrBadCRC, placed: 8, make: func(*victim, *rawPeer) []byte {
			b := seal(true, good)
			b[len(b)-1] ^= 1
			return b
		}},
		{name: "CRC of other payload", crc: true, want: iwarpwire.ErrBadCRC, placed: 8, make: func(*victim, *rawPeer) []byte {
			b := seal(true, good)
			b[iwarpwire.LengthLen+iwarpwire.UntaggedLen] ^= 0x80
			return b
		}},
		{name: "CRC missing", crc: true, want: iwarpwire.ErrBadCRC, placed: 8, make: func(*victim, *rawPeer) []byte { return seal(false, good) }},
		{name: "length of a long frame on a short one", crc: true, want: iwarpwire.ErrBadCRC, placed: 40, make: func(*victim, *rawPeer) []byte {
			b := seal(true, good)
			binary.BigEndian.PutUint16(b, uint16(len(good)+32))
			return append(b, bytesOf(32)...)
		}},
		{name: "length of a short frame on a long one", crc: true, want: iwarpwire.ErrBadCRC, placed: 4, make: func(*victim, *rawPeer) []byte {
			b := seal(true, good)
			binary.BigEndian.PutUint16(b, uint16(len(good)-4))
			return b
		}},
		{name: "length 0", want: iwarpwire.ErrMarker, make: sent(nil)},
		{name: "length 1", want: iwarpwire.ErrMarker, make: sent([]byte{0x41})},
		{name: "length less than an untagged header", want: iwarpwire.ErrMarker, make: sent(good[:iwarpwire.UntaggedLen-1])},
		{name: "length less than a tagged header", want: iwarpwire.ErrMarker, make: sent(write[:iwarpwire.TaggedLen-1])},
		{name: "length beyond the receive", want: iwarpwire.ErrTooLong, status: lenErr, make: func(*victim, *rawPeer) []byte {
			return append([]byte{0xff, 0xff}, good...)
		}},

		// DDP and RDMAP control octets.
		{name: "DDP version 0, untagged", want: iwarpwire.ErrUntaggedVersion, make: changed(good, 0, 0x40)},
		{name: "DDP version 2, untagged", want: iwarpwire.ErrUntaggedVersion, make: changed(good, 0, 0x42)},
		{name: "DDP version 0, tagged", want: iwarpwire.ErrTaggedVersion, make: changed(write, 0, 0xc0)},
		{name: "DDP version 3, tagged", want: iwarpwire.ErrTaggedVersion, make: changed(write, 0, 0xc3)},
		{name: "RDMAP version 0", want: iwarpwire.ErrRDMAPVersion, make: changed(good, 1, 0x03)},
		{name: "RDMAP version 2", want: iwarpwire.ErrRDMAPVersion, make: changed(write, 1, 0x80)},
		{name: "opcode 8", want: iwarpwire.ErrUnexpectedOpcode, make: changed(good, 1, 0x48)},
		{name: "opcode 15", want: iwarpwire.ErrUnexpectedOpcode, make: changed(write, 1, 0x4f)},
		{name: "Write untagged", want: iwarpwire.ErrUnexpectedOpcode, make: changed(good, 1, 0x40)},
		{name: "Send tagged", want: iwarpwire.ErrUnexpectedOpcode, make: changed(write, 1, 0x43)},
		{name: "Read Response untagged", want: iwarpwire.ErrUnexpectedOpcode, make: changed(good, 1, 0x42)},
		{name: "Terminate tagged", want: iwarpwire.ErrUnexpectedOpcode, make: changed(write, 1, 0x47)},

		// Queue number, MSN, MO.
		{name: "Send on queue 1", want: iwarpwire.ErrBadQN, make: sent(control(iwarpwire.Send, 1, 1, 0, true, bytesOf(8)))},
		{name: "Send on queue 3", want: iwarpwire.ErrBadQN, make: sent(control(iwarpwire.Send, 3, 1, 0, true, bytesOf(8)))},
		{name: "Send on queue 2^32-1", want: iwarpwire.ErrBadQN, make: sent(control(iwarpwire.SendSE, math.MaxUint32, 1, 0, true, nil))},
		{name: "Read Request on queue 0", want: iwarpwire.ErrBadQN, make: changed(readReq, 6, 0, 0, 0, 0)},
		{name: "Terminate on queue 0", want: iwarpwire.ErrBadQN, make: sent(control(iwarpwire.Terminate, 0, 1, 0, true, bytesOf(4)))},
		{name: "MSN 0", want: iwarpwire.ErrMSNRange, make: sent(sendOf(0, 0, true, bytesOf(8)))},
		{name: "MSN skipped", want: iwarpwire.ErrMSNRange, make: sent(sendOf(2, 0, true, bytesOf(8)))},
		{name: "MSN far away", want: iwarpwire.ErrMSNRange, make: sent(sendOf(math.MaxUint32, 0, true, bytesOf(8)))},
		{name: "MSN repeated", want: iwarpwire.ErrMSNRange, placed: 8, status: map[uint64]ibv.WCStatus{0: ibv.WCSuccess}, make: sent(good, good)},
		{name: "MSN of the next message inside one", want: iwarpwire.ErrMSNRange, placed: 8,
			make: sent(sendOf(1, 0, false, bytesOf(8)), sendOf(2, 8, true, bytesOf(8)))},
		{name: "MSN of a Read Request skipped", want: iwarpwire.ErrMSNRange, make: sent(readOf(2, iwarpwire.ReadReq{}))},
		{name: "MO at the start", want: iwarpwire.ErrBadMO, make: sent(sendOf(1, 8, true, bytesOf(8)))},
		{name: "MO with a gap", want: iwarpwire.ErrBadMO, placed: 8,
			make: sent(sendOf(1, 0, false, bytesOf(8)), sendOf(1, 9, true, bytesOf(8)))},
		{name: "MO going back", want: iwarpwire.ErrBadMO, placed: 8,
			make: sent(sendOf(1, 0, false, bytesOf(8)), sendOf(1, 7, true, bytesOf(8)))},
		{name: "MO 2^32-1", want: iwarpwire.ErrBadMO, make: sent(sendOf(1, math.MaxUint32, true, bytesOf(8)))},
		{name: "MO of a Read Request", want: iwarpwire.ErrBadMO, make: changed(readReq, 14, 0, 0, 0, 4)},
		{name: "Read Request of two segments", want: iwarpwire.ErrBadMO, make: changed(readReq, 0, 0x01)},

		// Receives.
		{name: "Send longer than the receive", want: iwarpwire.ErrTooLong, status: lenErr,
			make: sent(sendOf(1, 0, true, bytesOf(recvLen+1)))},
		{name: "Send longer than the receive in its second segment", want: iwarpwire.ErrTooLong, placed: recvLen, status: lenErr,
			make: sent(sendOf(1, 0, false, bytesOf(recvLen)), sendOf(1, recvLen, true, bytesOf(1)))},
		{name: "more Sends than receives", want: iwarpwire.ErrNoBuffer, placed: 16,
			status: map[uint64]ibv.WCStatus{0: ibv.WCSuccess, 1: ibv.WCSuccess},
			make:   sent(good, sendOf(2, 0, true, bytesOf(8)), sendOf(3, 0, true, bytesOf(8)))},
		{name: "empty Send without a receive", want: iwarpwire.ErrNoBuffer,
			status: map[uint64]ibv.WCStatus{0: ibv.WCSuccess, 1: ibv.WCSuccess},
			make:   sent(sendOf(1, 0, true, nil), sendOf(2, 0, true, nil), sendOf(3, 0, true, nil))},

		// RDMA Write.
		{name: "Write to an unknown STag", want: iwarpwire.ErrInvalidSTag, make: func(v *victim, _ *rawPeer) []byte {
			return seal(false, writeOf(v.mem.both.RKey()^1, v.mem.both.Addr(), bytesOf(8)))
		}},
		{name: "Write to STag 0", want: iwarpwire.ErrInvalidSTag, make: sent(writeOf(0, 0, bytesOf(8)))},
		{name: "Write one byte before", want: iwarpwire.ErrBaseBounds, make: onto(both, -1, 1)},
		{name: "Write from one byte before", want: iwarpwire.ErrBaseBounds, make: onto(both, -1, 8)},
		{name: "Write one byte behind", want: iwarpwire.ErrBaseBounds, make: onto(both, regionLen, 1)},
		{name: "Write to one byte behind", want: iwarpwire.ErrBaseBounds, make: onto(both, regionLen-7, 8)},
		{name: "Write of one byte more than all", want: iwarpwire.ErrBaseBounds, make: onto(both, 0, regionLen+1)},
		{name: "Write at an address in the process", want: iwarpwire.ErrBaseBounds, make: func(v *victim, _ *rawPeer) []byte {
			return seal(false, writeOf(v.mem.both.RKey(), uint64(addr(v.mem.region(1))), bytesOf(8)))
		}},
		{name: "Write without permission", want: iwarpwire.ErrInvalidSTag, make: onto(forRead, 0, 8)},
		{name: "Write to local memory", want: iwarpwire.ErrInvalidSTag, make: onto(local, 0, 8)},
		{name: "Write that wraps", want: iwarpwire.ErrTaggedWrap, make: func(v *victim, _ *rawPeer) []byte {
			return seal(false, writeOf(v.mem.both.RKey(), math.MaxUint64-3, bytesOf(8)))
		}},
		{name: "Write with the STag of another domain", want: iwarpwire.ErrInvalidSTag, make: func(v *victim, _ *rawPeer) []byte {
			other := newMemory(v.t, &Provider{v.mem.pd.(*pd).dev})
			v.t.Cleanup(func() {
				require.Zero(v.t, other.touched())
				other.close()
			})
			return seal(false, writeOf(other.both.RKey(), other.both.Addr(), bytesOf(8)))
		}},
		{name: "Write with an STag that was taken back", want: iwarpwire.ErrInvalidSTag,
			status: map[uint64]ibv.WCStatus{0: ibv.WCSuccess}, placed: 8,
			make: func(v *victim, _ *rawPeer) []byte {
				inv := segmentOf(iwarpwire.Header{Op: iwarpwire.SendInv, MSN: 1, Last: true, InvSTag: v.mem.both.RKey()}, bytesOf(8))
				return append(seal(false, inv), seal(false, writeOf(v.mem.both.RKey(), v.mem.both.Addr(), bytesOf(8)))...)
			}},
		{name: "Write with the STag of another stream", want: iwarpwire.ErrTaggedNotAssociated, make: func(v *victim, _ *rawPeer) []byte {
			mr := v.neighboursRegion()
			return seal(false, writeOf(mr.RKey(), mr.Addr(), bytesOf(8)))
		}},
		{name: "second segment of a Write out of bounds", want: iwarpwire.ErrBaseBounds, placed: 8, make: func(v *victim, _ *rawPeer) []byte {
			h := iwarpwire.Header{Tagged: true, Op: iwarpwire.Write, STag: v.mem.write.RKey(), TO: v.mem.write.Addr()}
			first := segmentOf(h, bytesOf(8))
			h.TO += regionLen
			h.Last = true
			return append(seal(false, first), seal(false, segmentOf(h, bytesOf(8)))...)
		}},

		// Send with Invalidate.
		{name: "unknown STag to invalidate", want: iwarpwire.ErrCannotInvalidate, placed: 8,
			make: sent(segmentOf(iwarpwire.Header{Op: iwarpwire.SendInv, MSN: 1, Last: true, InvSTag: 5}, bytesOf(8)))},
		{name: "local STag to invalidate", want: iwarpwire.ErrCannotInvalidate, placed: 8, make: func(v *victim, _ *rawPeer) []byte {
			return seal(false, segmentOf(iwarpwire.Header{Op: iwarpwire.SendSEInv, MSN: 1, Last: true, InvSTag: v.mem.local.RKey()}, bytesOf(8)))
		}},

		{name: "STag of another stream to invalidate", want: iwarpwire.ErrSTagNotAssociated, placed: 8, make: func(v *victim, _ *rawPeer) []byte {
			mr := v.neighboursRegion()
			return seal(false, segmentOf(iwarpwire.Header{Op: iwarpwire.SendInv, MSN: 1, Last: true, InvSTag: mr.RKey()}, bytesOf(8)))
		}},

		// Read Request.
		{name: "Read of an unknown STag", want: iwarpwire.ErrRemoteInvalidSTag, request: true, make: func(v *victim, _ *rawPeer) []byte {
			return seal(false, readOf(1, iwarpwire.ReadReq{Size: 8, SrcSTag: v.mem.both.RKey() ^ 1, SrcTO: v.mem.both.Addr()}))
		}},
		{name: "Read one byte before", want: iwarpwire.ErrRemoteBounds, request: true, make: from(both, -1, 1)},
		{name: "Read one byte behind", want: iwarpwire.ErrRemoteBounds, request: true, make: from(both, regionLen, 1)},
		{name: "Read to one byte behind", want: iwarpwire.ErrRemoteBounds, request: true, make: from(forRead, regionLen-7, 8)},
		{name: "Read of 2^32-1 bytes", want: iwarpwire.ErrRemoteBounds, request: true, make: from(forRead, 0, math.MaxUint32)},
		{name: "Read without permission", want: iwarpwire.ErrRemoteAccess, request: true, make: from(forWrit, 0, 8)},
		{name: "Read of local memory", want: iwarpwire.ErrRemoteAccess, request: true, make: from(local, 0, 8)},
		{name: "Read with the STag of another stream", want: iwarpwire.ErrSTagNotAssociated, request: true, make: func(v *victim, _ *rawPeer) []byte {
			mr := v.neighboursRegion()
			return seal(false, readOf(1, iwarpwire.ReadReq{Size: 8, SrcSTag: mr.RKey(), SrcTO: mr.Addr()}))
		}},
		{name: "Read that wraps", want: iwarpwire.ErrTOWrap, request: true, make: func(v *victim, _ *rawPeer) []byte {
			return seal(false, readOf(1, iwarpwire.ReadReq{Size: 8, SrcSTag: v.mem.both.RKey(), SrcTO: math.MaxUint64 - 3}))
		}},
		{name: "Read Request too short", want: iwarpwire.ErrTooLong, make: sent(readReq[:iwarpwire.ReadRequestLen-1])},
		{name: "Read Request too long", want: iwarpwire.ErrTooLong, make: sent(append(bytes.Clone(readReq), 0))},
		{name: "Read Request without its payload", want: iwarpwire.ErrTooLong, make: sent(readReq[:iwarpwire.UntaggedLen])},

		// Read Response.
		{name: "Read Response unasked", want: iwarpwire.ErrInvalidSTag, make: func(v *victim, _ *rawPeer) []byte {
			return seal(false, answerOf(v.mem.local.RKey(), v.mem.local.Addr(), true, bytesOf(8)))
		}},
		{name: "Read Response longer than asked", want: iwarpwire.ErrBaseBounds, read: true, status: badRead,
			make: answer(func(stag uint32, to uint64) [][]byte { return [][]byte{answerOf(stag, to, true, bytesOf(recvLen+1))} })},
		{name: "Read Response longer than asked in its second segment", want: iwarpwire.ErrBaseBounds, placed: recvLen - 1, read: true, status: badRead,
			make: answer(func(stag uint32, to uint64) [][]byte {
				return [][]byte{answerOf(stag, to, false, bytesOf(recvLen-1)), answerOf(stag, to+recvLen-1, true, bytesOf(2))}
			})},
		{name: "Read Response shorter than asked", want: iwarpwire.ErrBaseBounds, read: true, status: badRead,
			make: answer(func(stag uint32, to uint64) [][]byte { return [][]byte{answerOf(stag, to, true, bytesOf(recvLen-1))} })},
		{name: "Read Response that does not end", want: iwarpwire.ErrBaseBounds, read: true, status: badRead,
			make: answer(func(stag uint32, to uint64) [][]byte { return [][]byte{answerOf(stag, to, false, bytesOf(recvLen))} })},
		{name: "Read Response with a wrong STag", want: iwarpwire.ErrInvalidSTag, read: true, status: badRead,
			make: answer(func(stag uint32, to uint64) [][]byte { return [][]byte{answerOf(stag+1, to, true, bytesOf(recvLen))} })},
		{name: "Read Response before its place", want: iwarpwire.ErrBaseBounds, read: true, status: badRead,
			make: answer(func(stag uint32, to uint64) [][]byte { return [][]byte{answerOf(stag, to-1, true, bytesOf(recvLen))} })},
		{name: "Read Response with a gap", want: iwarpwire.ErrBaseBounds, placed: 8, read: true, status: badRead,
			make: answer(func(stag uint32, to uint64) [][]byte {
				return [][]byte{answerOf(stag, to, false, bytesOf(8)), answerOf(stag, to+9, true, bytesOf(recvLen-8))}
			})},
		{name: "second Read Response for one Read", want: iwarpwire.ErrInvalidSTag, placed: recvLen, read: true,
			status: map[uint64]ibv.WCStatus{readID: ibv.WCSuccess},
			make: answer(func(stag uint32, to uint64) [][]byte {
				a := answerOf(stag, to, true, bytesOf(recvLen))
				return [][]byte{a, a}
			})},

		// Terminate.
		{name: "Terminate longer than any", want: iwarpwire.ErrTooLong,
			make: sent(control(iwarpwire.Terminate, iwarpwire.QNTerminate, 1, 0, true, bytesOf(200)))},
		{name: "Terminate in two segments", want: iwarpwire.ErrTooLong,
			make: sent(control(iwarpwire.Terminate, iwarpwire.QNTerminate, 1, 0, false, bytesOf(2)))},
		{name: "Terminate with an offset", want: iwarpwire.ErrTooLong,
			make: sent(control(iwarpwire.Terminate, iwarpwire.QNTerminate, 1, 4, true, bytesOf(4)))},
	}
	return list
}

// Every attack ends its own connection, with the Terminate that the RFCs give
// it, and touches nothing else: no other memory, no other connection.
func TestAttacks(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg Config) {
		leaktest.Check(t)
		s := newSite(t, cfg)
		good := s.bystander()
		for _, a := range attacks() {
			t.Run(a.name, func(t *testing.T) {
				s := &site{t, s.p, s.ln}
				mem := newMemory(t, s.p)
				v, p := s.connect(mem, a.crc, 2)
				p.send(a.make(v, p))

				posted := 2
				if a.read {
					posted++
				}
				for id, got := range v.completions(posted) {
					want, ok := a.status[id]
					if !ok {
						want = ibv.WCFlushErr
					}
					require.Equal(t, want, got, "status of request %d", id)
				}
				require.ErrorIs(t, v.event().Err, a.want)
				require.Equal(t, ibv.QPSError, v.qp.State())

				m := p.terminate()
				require.Equal(t, *a.want, m.Err)
				require.Equal(t, a.request, len(m.RDMAP) > 0, "the Read Request in the Terminate")
				if a.want.Layer == 2 {
					require.False(t, m.HasSegLen)
				}
				v.close()
				require.Equal(t, a.placed, mem.touched(), "bytes placed")
				mem.close()
				p.conn.Close()
			})
			good.check()
		}
		good.close()
	})
}

// A peer that takes none of the answers it asks for gets as many as were
// agreed at set-up, and not one more.
func TestMoreReadsThanAgreed(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg Config) {
		leaktest.Check(t)
		s := newSite(t, cfg)
		mem := newMemory(t, s.p)
		// More than the sockets on both sides will ever hold.
		big := make([]byte, 64<<20)
		mr, err := mem.pd.RegMR(big, ibv.AccessRemoteRead)
		require.NoError(t, err)
		v, p := s.connect(mem, false, 0)
		var b []byte
		for msn := range uint32(depths.ResponderResources + 1) {
			b = append(b, seal(false, readOf(msn+1, iwarpwire.ReadReq{Size: uint32(len(big)), SrcSTag: mr.RKey(), SrcTO: mr.Addr()}))...)
		}
		p.send(b)
		require.ErrorIs(t, v.event().Err, iwarpwire.ErrCatastrophic)
		v.close()
		require.NoError(t, mr.Close())
		p.conn.Close()
		mem.close()
	})
}

// A Terminate of the peer ends the connection and is not answered, whatever is
// in it.
func TestTerminated(t *testing.T) {
	readable := iwarpwire.TermMsg{Err: *iwarpwire.ErrRemoteAccess}
	for _, tt := range []struct {
		name    string
		payload []byte
		want    error // *RemoteError, ErrTerminateLen
	}{
		{"readable", readable.Append(nil), &RemoteError{0, 1, 2}},
		{"unknown reason", []byte{0xff, 0xff, 0, 0}, &RemoteError{15, 15, 0xff}},
		{"empty", nil, iwarpwire.ErrTerminateLen},
		{"short", []byte{0, 0, 0}, iwarpwire.ErrTerminateLen},
		{"announces a length", []byte{0x10, 0, 0x80, 0}, iwarpwire.ErrTerminateLen},
		{"announces headers", []byte{0x10, 0, 0xe0, 0, 0, 0}, iwarpwire.ErrTerminateLen},
		{"all bits set", bytes.Repeat([]byte{0xff}, 64), &RemoteError{15, 15, 0xff}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			eachMode(t, func(t *testing.T, cfg Config) {
				leaktest.Check(t)
				s := newSite(t, cfg)
				mem := newMemory(t, s.p)
				v, p := s.connect(mem, false, 2)
				p.send(seal(false, control(iwarpwire.Terminate, iwarpwire.QNTerminate, 1, 0, true, tt.payload)))
				for id, status := range v.completions(2) {
					require.Equal(t, ibv.WCFlushErr, status, "request %d", id)
				}
				err := v.event().Err
				var remote *RemoteError
				if want, ok := tt.want.(*RemoteError); ok {
					require.ErrorAs(t, err, &remote)
					require.Equal(t, want, remote)
				} else {
					require.ErrorIs(t, err, tt.want)
				}
				p.ended()
				v.close()
				require.Zero(t, mem.touched())
				mem.close()
			})
		})
	}
}

// A recording is a stream of bytes that a good peer sends, and the places where
// it may end without breaking a message.
type recording struct {
	b    []byte
	ends map[int]bool
}

func (r *recording) add(ulpdu []byte, whole bool) {
	r.b = append(r.b, seal(true, ulpdu)...)
	if whole {
		r.ends[len(r.b)] = true
	}
}

// record plays a peer that uses everything: all kinds of messages, in one
// segment and in more, CRCs, and the answer to the Read of the victim.
func record(m *memory) *recording {
	r := &recording{b: request(true), ends: make(map[int]bool)}
	r.ends[len(r.b)] = true
	r.add(writeOf(1, 0, nil), true)
	r.add(sendOf(1, 0, true, bytesOf(10)), true)
	r.add(sendOf(2, 0, false, bytesOf(7)), false)
	r.add(sendOf(2, 7, true, bytesOf(9)), true)
	r.add(writeOf(m.write.RKey(), m.write.Addr(), bytesOf(21)), true)
	r.add(segmentOf(iwarpwire.Header{Tagged: true, Op: iwarpwire.Write, STag: m.write.RKey(), TO: m.write.Addr()}, bytesOf(3)), false)
	r.add(writeOf(m.write.RKey(), m.write.Addr()+3, bytesOf(4)), true)
	r.add(readOf(1, iwarpwire.ReadReq{SinkSTag: 1, Size: 16, SrcSTag: m.read.RKey(), SrcTO: m.read.Addr()}), true)
	r.add(answerOf(m.local.RKey(), m.local.Addr()+sinkAt, false, bytesOf(recvLen/2)), false)
	r.add(answerOf(m.local.RKey(), m.local.Addr()+sinkAt+recvLen/2, true, bytesOf(recvLen/2)), true)
	r.add(segmentOf(iwarpwire.Header{Op: iwarpwire.SendSEInv, MSN: 3, Last: true, InvSTag: m.both.RKey()}, nil), true)
	return r
}

// A connection that is cut ends, wherever that happens: in an orderly way
// between messages, with an error inside of one.
func TestCutAnywhere(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg Config) {
		leaktest.Check(t)
		s := newSite(t, cfg)
		length := len(record(newMemory(t, s.p)).b)
		setUp := len(request(true))
		for n := range length + 1 {
			for _, reset := range []bool{false, true} {
				name := fmt.Sprintf("cut after %d of %d bytes, reset %v", n, length, reset)
				mem := newMemory(t, s.p)
				r := record(mem)
				p := dialRaw(t, s.ln.Addr())
				p.send(r.b[:min(n, setUp)])
				if n < setUp {
					p.hangUp(reset)
					p.drain()
					mem.close()
					continue
				}
				v := newVictim(t, s.accept(name), mem, 3)
				require.NoError(t, v.id.Accept(t.Context(), depths), name)
				v.read(recvLen)
				p.start(true)
				p.send(r.b[setUp:n])
				p.hangUp(reset)
				v.completions(4)
				if err := v.event().Err; !reset {
					require.Equal(t, r.ends[n], err == nil, "%s: %v", name, err)
				}
				v.close()
				p.drain()
				mem.touched()
				mem.close()
			}
		}
		good := s.bystander()
		good.check()
		good.close()
	})
}
