package rdmanet

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// A peer that keeps to the rules is served, in both directions.
func TestTransferBothDirections(t *testing.T) {
	eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
		const n = 100000
		for id := range uint32(3) {
			id++
			want := pattern(uint64(id), n)

			wrote := writing(c, want)
			h, first, ok := p.ReceiveTransfer()
			require.True(t, ok)
			require.Equal(t, id, h.ID)
			require.Zero(t, h.Rest)
			require.Equal(t, n, len(first)+int(h.Length))
			got := make([]byte, h.Length)
			if reads {
				require.Equal(t, smbdpeer.Offer, h.Kind)
				require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpRead, got, h.Addr, h.Key))
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: id, Length: h.Length})
			} else {
				require.Equal(t, smbdpeer.Request, h.Kind)
				addr, key := p.Register(got)
				half := h.Length / 2
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: id, Addr: addr, Key: key, Length: half})
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: id, Addr: addr + uint64(half), Key: key, Length: h.Length - half})
				for _, l := range []uint32{half, h.Length - half} {
					require.Equal(t, smbdpeer.Transfer{Kind: smbdpeer.Written, ID: id, Length: l}, p.ExpectTransfer(smbdpeer.Written))
				}
			}
			require.Equal(t, result{n, nil}, s.await(wrote))
			defect.Bytes(t, want, append(first, got...))

			b := make([]byte, n)
			read := reading(c, b)
			addr, key := p.Register(want)
			p.Begin(reads, id, n, addr, key)
			if reads {
				require.Equal(t, smbdpeer.Transfer{Kind: smbdpeer.Done, ID: id, Length: n}, p.ExpectTransfer(smbdpeer.Done))
			} else {
				g := p.ExpectTransfer(smbdpeer.Grant)
				require.Equal(t, id, g.ID)
				require.EqualValues(t, n, g.Length)
				require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpWrite, want, g.Addr, g.Key))
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: id, Length: n})
			}
			require.Equal(t, result{n, nil}, s.await(read))
			defect.Bytes(t, want, b)
		}
		require.NoError(t, c.Close())
	})
}

// Where transfers were not agreed on, the flag means nothing.
func TestTransferFlagIgnoredUnlessAgreed(t *testing.T) {
	for _, side := range sides {
		for name, private := range map[string][]byte{"plain": nil, "rdmanet": rdmanetPrivate} {
			t.Run(side.name+"/"+name, func(t *testing.T) {
				s := newScene(t)
				c, p := s.conns(side.active, private)
				for _, kind := range []smbdpeer.TransferKind{smbdpeer.Offer, smbdpeer.Request, smbdpeer.Grant, smbdpeer.Written, smbdpeer.Done, smbdpeer.Withdraw, 7} {
					p.SendTransfer(smbdpeer.Transfer{Kind: kind, ID: 1, Addr: 1, Key: bogus, Length: 1 << 20})
				}
				p.WaitCredit()
				p.Credits--
				b := smbdpeer.Segment(10, 0)
				b[5] |= byte(smbdpeer.FlagTransfer >> 8)
				p.Send(b)
				require.NoError(t, defect.ReadFull(c, b[smbdpeer.PayloadOffset:]))
				require.Zero(t, c.Stats().TransfersReceived)

				wrote := writing(c, alloc(t, 20000).Bytes())
				for n := 0; n < 20000; {
					h, payload, ok := p.ReceiveData()
					require.True(t, ok)
					require.Zero(t, h.Flags&smbdpeer.FlagTransfer)
					n += len(payload)
					p.WaitCredit()
					p.Grant(2)
				}
				require.Equal(t, result{20000, nil}, s.await(wrote))
			})
		}
	}
}

// Fields that a kind of transfer header does not name are not looked at: an empty
// message that comes with such a header has no length.
func TestTransferUnnamedFieldsIgnored(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			s := newScene(t)
			private := smbdpeer.ParsePrivateData(transferPrivate(true))
			private.Features |= smbdpeer.FeatureMessages
			c, p := s.conns(side.active, private.Append(nil))
			b := make([]byte, 10)
			read := reading(c, b)
			addr, key := p.Register(make([]byte, 10))
			p.Begin(true, 1, 10, addr, key)
			require.Equal(t, result{10, nil}, s.await(read))
			p.ExpectTransfer(smbdpeer.Done)
			w := smbdpeer.Transfer{Kind: smbdpeer.Withdraw, ID: 1, Length: 1 << 29, Rest: 1 << 30}.Message(nil)
			w[5] |= byte(smbdpeer.FlagEmptyMessage >> 8)
			p.WaitCredit()
			p.Credits--
			p.Send(w)
			n, err := c.ReadMsg(b)
			require.NoError(t, err)
			require.Zero(t, n)
		})
	}
}

// Lengths that add up to more than an int holds, on 32-bit systems. The test calls the arithmetic on
// a connection of its own making: no test machine has so much memory to transfer.
func TestTransferLengthsBeyondInt(t *testing.T) {
	var in recvQueue
	for range 4 {
		in.unread.Push(segment{transfer: &recvTransfer{length: transferCeiling}})
	}
	require.Equal(t, math.MaxInt32, in.offeredBytes(math.MaxInt32, false))
	require.Equal(t, 1, in.offeredBytes(1, false))
	require.Equal(t, int64(4*transferCeiling), int64(in.offeredBytes(math.MaxInt, false))+max(0, 4*transferCeiling-math.MaxInt))

	p, err := regmem.AllocPages(transferCeiling) // never touched
	require.NoError(t, err)
	defer regmem.FreePages(p)
	o := &sendTransfer{p: p, moved: transferCeiling, done: true, writing: 1}
	tx := transferSender{writers: new(cqwait.Group), wait: new(cqwait.Waiter)}
	tx.moved(o, transferCeiling)
	require.Equal(t, transferCeiling, o.moved)
}
