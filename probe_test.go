package rdmanet

import (
	"encoding/binary"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
)

// A pulse is found behind the early negotiation message, or where that is missing
// behind the fixed part.
func TestParsePulse(t *testing.T) {
	base := privateData{rdmanet: true, features: featureFIN | featureNoEmptyRead | featurePulse, maxReceive: 8136}
	early := base
	early.features |= featureEarly
	want := &probeTarget{addr: 0x0102030405060708, key: 0x090a0b0c}
	request := append(goodRequest.wire(), wireGrant(8)...)
	for _, tt := range []struct {
		name  string
		b     []byte
		early int
		ok    bool
	}{
		{"request", want.append(base.append(nil)), earlyRequestLen, true},
		{"response", want.append(base.append(nil)), earlyResponseLen, true},
		{"early request", want.append(append(early.append(nil), request...)), earlyRequestLen, true},
		{"early response", want.append(append(early.append(nil), goodResponse.wire()...)), earlyResponseLen, true},
		{"padded", append(want.append(base.append(nil)), make([]byte, 99)...), earlyRequestLen, true},
		{"not said", want.append(privateData{rdmanet: true, features: featureNoEmptyRead}.append(nil)), earlyRequestLen, false},
		{"cut short", want.append(base.append(nil))[:privateLen+probeTargetLen-1], earlyRequestLen, false},
		{"early and cut short", want.append(append(early.append(nil), request...))[:earlyRequestLen+probeTargetLen-1], earlyRequestLen, false},
		{"plain peer", append(make([]byte, privateLen), want.append(nil)...), earlyRequestLen, false},
		{"nothing", nil, earlyRequestLen, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := parseProbeTarget(tt.b, tt.early); tt.ok {
				require.Equal(t, want, got)
			} else {
				require.Nil(t, got)
			}
		})
	}
}

// pulsePrivate is the private data of a peer with this pulse.
func pulsePrivate(p probeTarget) []byte {
	return p.append(privateData{ird: 4, ord: 4, rdmanet: true, features: featureFIN | featureTransfer | featureNoEmptyRead | featurePulse, maxReceive: 8136}.append(nil))
}

// A peer whose pulse is where it says is asked by it, and one with none there loses
// its connection over it, with an error that tells.
func TestPulseAtTheWire(t *testing.T) {
	for _, side := range sides {
		for _, honest := range []bool{true, false} {
			t.Run(side.name+map[bool]string{true: "/honest", false: "/bogus"}[honest], func(t *testing.T) {
				s := newScene(t)
				s.cfg.KeepAlive, s.cfg.LingerTimeout = time.Hour, -1
				var c *Conn
				var p *badPeer
				memory := []byte{0}
				where := func(p *badPeer) probeTarget {
					addr, key := p.open(memory)
					if !honest {
						addr += 1 << 30
					}
					return probeTarget{addr, key}
				}
				if side.active {
					ln := listenBad(t)
					result := s.dial(ln)
					p = acceptBad(t, ln)
					private := pulsePrivate(where(p))
					require.NoError(t, p.id.Accept(tctx, badParam(p.id, private)))
					require.Len(t, p.hear(), negotiateRequestLen)
					p.say(goodResponse.wire())
					r := <-result
					require.NoError(t, r.err)
					c = s.owned(r.c)
				} else {
					ln := s.listen()
					p = dialBadWith(t, ln.Addr(), func(p *badPeer) []byte { return pulsePrivate(where(p)) })
					p.negotiate()
					conn, err := ln.Accept()
					require.NoError(t, err)
					c = s.owned(conn)
				}
				c.mu.Lock()
				require.True(t, c.live.answersReads && c.live.target != nil)
				begun := c.queueBarrier()
				c.unlock()
				require.True(t, begun)
				if honest {
					require.True(t, eventually(func() bool {
						c.mu.Lock()
						defer c.unlock()
						c.poll()
						return !c.send.barrier && !c.life.over()
					}), "no answer")
					return
				}
				_, err := c.Read(make([]byte, 1))
				require.Error(t, err)
				require.NotErrorIs(t, err, io.EOF)
				s.ended(err)
			})
		}
	}
}

// A peer that is not rdmanet is asked by RDMA Reads of no bytes only where every device
// answers them rightly.
func TestPlainPeerProbe(t *testing.T) {
	for _, side := range sides {
		for _, all := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%v", side.name, all), func(t *testing.T) {
				dev := newModest(t, 1<<20, 1<<14, false)
				dev.others = &all
				s := newSceneOn(t, dev)
				c, _ := s.conns(side.active, []byte{0, 0, 0, 1, 0, 0, 0, 1})
				require.False(t, c.Info().Rdmanet)
				require.Equal(t, all, c.live.answersReads)
			})
		}
	}
}

// The pulse is all that a peer can read, and it can as long as the connection lives.
func TestPulseOpensOneByte(t *testing.T) {
	for _, beyond := range []int{0, 1} {
		t.Run(fmt.Sprint(beyond), func(t *testing.T) {
			m := newModest(t, 1<<20, 1<<14, false)
			m.garble = true
			s := newSceneOn(t, m)
			s.cfg.LingerTimeout, s.cfg.TransferSize = -1, -1
			ln := s.listen()
			p := dialBad(t, ln.Addr(), transferPrivate(true))
			theirs := parseProbeTarget(p.id.PrivateData(), earlyResponseLen)
			require.NotNil(t, theirs)
			p.negotiate()
			c, err := ln.Accept()
			require.NoError(t, err)
			s.owned(c)
			got := []byte{255}
			if beyond > 0 {
				status := p.rdma(ibv.OpRead, got, theirs.addr+probeBytes, theirs.key)
				require.NotEqual(t, ibv.WCSuccess, status)
				return
			}
			for range 3 {
				require.Equal(t, ibv.WCSuccess, p.rdma(ibv.OpRead, got, theirs.addr, theirs.key))
				require.Zero(t, got[0])
			}
		})
	}
}

// A parser of anything finds a pulse where one was put.
func FuzzPulse(f *testing.F) {
	f.Add(pulsePrivate(probeTarget{1, 2}), true)
	f.Add(earlyPrivate(goodResponse.wire()), false)
	f.Fuzz(func(t *testing.T, b []byte, request bool) {
		early := earlyResponseLen
		if request {
			early = earlyRequestLen
		}
		p := parseProbeTarget(b, early)
		if p == nil {
			return
		}
		at := privateLen
		if binary.BigEndian.Uint16(b[14:])&featureEarly != 0 {
			at = early
		}
		require.Equal(t, b[at:at+probeTargetLen], p.append(nil))
	})
}
