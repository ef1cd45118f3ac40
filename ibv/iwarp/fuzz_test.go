package iwarp

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// What the input of FuzzDevice is fed to, in the low bits of its first byte.
const (
	fuzzStream  = iota // a queue pair that is connected
	fuzzCRC            // the same with CRCs
	fuzzRequest        // a listener: the input begins with the MPA Request
	fuzzReply          // a Connect: the input begins with the MPA Reply
	fuzzTargets

	fuzzPortable = 0x10 // the device keeps to portable calls
	fuzzPieces   = 0x20 // the input goes out in small pieces
)

// pin gives the regions keys and addresses that a seed can name.
func (m *memory) pin() {
	p := m.pd.(*pd)
	p.gate.Lock()
	defer p.gate.Unlock()
	clear(p.mrs)
	for i, r := range m.mrs {
		r := r.(*mr)
		r.stag, r.base = pinnedSTag+uint32(i), pinnedBase
		p.mrs[r.stag] = r
	}
}

const (
	pinnedSTag = 0x100 // local, then those for both, for reading, for writing
	pinnedBase = 0x1000
)

// Whatever a peer sends, before or after set-up, the device neither panics nor
// hangs, writes where it may only, and leaves nothing behind.
func FuzzDevice(f *testing.F) {
	both, forWriting, forReading := uint32(pinnedSTag+1), uint32(pinnedSTag+3), uint32(pinnedSTag+2)
	streams := [][]byte{
		sendOf(1, 0, true, bytesOf(recvLen)),
		sendOf(1, 0, false, bytesOf(8)),
		sendOf(1, 8, true, bytesOf(8)),
		sendOf(2, 0, true, nil),
		writeOf(both, pinnedBase, bytesOf(regionLen)),
		writeOf(forWriting, pinnedBase+regionLen-1, bytesOf(1)),
		writeOf(forWriting, pinnedBase+regionLen, bytesOf(1)),
		readOf(1, iwarpwire.ReadReq{SinkSTag: 1, Size: regionLen, SrcSTag: forReading, SrcTO: pinnedBase}),
		answerOf(pinnedSTag, pinnedBase+sinkAt, true, bytesOf(recvLen)),
		answerOf(pinnedSTag, pinnedBase+sinkAt, false, bytesOf(1)),
		segmentOf(iwarpwire.Header{Op: iwarpwire.SendInv, MSN: 1, Last: true, InvSTag: both}, nil),
		control(iwarpwire.Terminate, iwarpwire.QNTerminate, 1, 0, true, []byte{0x10, 0, 0, 0}),
	}
	for _, mode := range []byte{fuzzStream, fuzzCRC} {
		var all []byte
		for _, u := range streams {
			b := seal(mode == fuzzCRC, u)
			all = append(all, b...)
			f.Add(mode, b)
		}
		f.Add(mode, all)
		f.Add(mode|fuzzPortable|fuzzPieces, all)
	}
	f.Add(byte(fuzzRequest), request(false))
	f.Add(byte(fuzzRequest), request(true)[:19])
	f.Add(byte(fuzzReply), append(reply(0x8002, 0x8002), seal(false, sendOf(1, 0, true, nil))...))
	f.Add(byte(fuzzReply), header(replyKey, 0x20, 1, 0))

	f.Fuzz(func(t *testing.T, mode byte, stream []byte) {
		before := leaktest.Take()
		cfg := Config{portable: mode&fuzzPortable != 0}
		switch mode & 0x0f % fuzzTargets {
		case fuzzStream, fuzzCRC:
			fuzzConnected(t, cfg, mode&0x0f%fuzzTargets == fuzzCRC, mode&fuzzPieces != 0, stream)
		case fuzzRequest:
			fuzzListener(t, cfg, mode&fuzzPieces != 0, stream)
		case fuzzReply:
			fuzzConnect(t, cfg, mode&fuzzPieces != 0, stream)
		}
		before.Check(t)
	})
}

// feed sends the input and then ends the stream. The device may end the
// connection before.
func (p *rawPeer) feed(stream []byte, pieces bool) {
	p.conn.SetDeadline(time.Now().Add(patience))
	for step := 7; pieces && len(stream) > step; stream = stream[step:] {
		p.conn.Write(stream[:step])
	}
	p.conn.Write(stream)
	p.conn.CloseWrite()
}

// outcome waits for the end of a connection that the peer has ended, with work
// of all kinds posted, and releases it.
func (v *victim) outcome() {
	v.t.Helper()
	posted := 2 // receives
	for _, wr := range []ibv.SendWR{
		v.readRequest(recvLen),
		{ID: readID + 1, Flags: ibv.SendSignaled | ibv.SendInline, SGL: []ibv.SGE{{Buf: make([]byte, 5000)}}},
	} {
		n, err := v.qp.PostSend([]ibv.SendWR{wr})
		posted += n
		if !errors.Is(err, ibv.ErrLimit) { // the peer serves no Reads
			require.NoError(v.t, err)
		}
	}
	v.completions(posted)
	v.event()
	v.close()
	v.mem.touched()
	v.mem.close()
}

func fuzzConnected(t *testing.T, cfg Config, crc, pieces bool, stream []byte) {
	s := newSite(t, cfg)
	mem := newMemory(t, s.p)
	mem.pin()
	v, p := s.connect(mem, crc, 2)
	p.feed(stream, pieces)
	v.outcome()
	p.drain()
	require.NoError(t, s.ln.Close())
}

func fuzzListener(t *testing.T, cfg Config, pieces bool, stream []byte) {
	s := newSite(t, cfg)
	served := make(chan struct{})
	go func() {
		defer close(served)
		id, err := s.ln.Accept(context.Background())
		if err != nil {
			return // the listener was closed
		}
		mem := newMemory(t, s.p)
		mem.pin()
		v := newVictim(t, id, mem, 2)
		if id.Accept(context.Background(), depths) == nil {
			v.outcome()
			return
		}
		v.close()
		mem.close()
	}()
	p := dialRaw(t, s.ln.Addr())
	p.feed(stream, pieces)
	p.drain()
	require.NoError(t, s.ln.Close())
	<-served
}

func fuzzConnect(t *testing.T, cfg Config, pieces bool, stream []byte) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	v, result := dialing(t, cfg, ln.(*net.TCPListener))
	v.mem.pin()
	conn, err := ln.Accept()
	require.NoError(t, err)
	p := newRawPeer(t, conn)
	p.start(false)
	p.feed(stream, pieces)
	if <-result == nil {
		v.outcome()
	} else {
		v.close()
		v.mem.close()
	}
	p.drain()
	ln.Close()
}
