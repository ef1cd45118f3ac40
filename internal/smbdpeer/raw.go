package smbdpeer

import (
	"bytes"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// A Raw peer puts on the wire what a test gives it, malformed messages included. It receives,
// and posts its receives again, but nothing else happens by itself: it negotiates nothing,
// answers nothing and grants nothing. Its methods belong to one goroutine at a time and fail
// the test when they wait in vain.
type Raw struct {
	// ID is the connection.
	ID ibv.ID

	// Sent and Received count Data Transfer messages, but for those that Receive and Poll
	// return. They begin behind the negotiation.
	Sent, Received int

	// Credits is how many Data Transfer messages the other end can take. Methods that send
	// such messages and methods that receive them keep the count, but for Send.
	Credits int

	t        testing.TB
	patience time.Duration // how long a method waits
	pd       ibv.PD
	cq       ibv.CQ
	qp       ibv.QP
	mr       ibv.MR // of buf
	buf      []byte // receives
	regions  []ibv.MR
	over     chan struct{} // closed at the end of the connection
	early    [][]byte      // messages that came while the peer waited for something else
	flushed  bool          // a completion has told of the end
}

const (
	rawReceives    = 32
	rawReceiveSize = 9000
)

// NewRaw makes a queue pair for a connection that has not been made yet. It is closed with the
// test. patience is how long methods wait before they fail the test.
func NewRaw(t testing.TB, id ibv.ID, patience time.Duration) *Raw {
	t.Helper()
	p, err := TryRaw(t, id, patience)
	p.must(err)
	return p
}

// TryRaw is NewRaw for a connection that may be over, for which an RDMA device makes no queue
// pair.
func TryRaw(t testing.TB, id ibv.ID, patience time.Duration) (*Raw, error) {
	t.Helper()
	p := &Raw{ID: id, t: t, patience: patience, over: make(chan struct{}), buf: make([]byte, rawReceives*rawReceiveSize)}
	var err error
	p.pd, err = id.Device().AllocPD()
	p.must(err)
	p.cq, err = id.Device().CreateCQ(1024)
	p.must(err)
	p.mr, err = p.pd.RegMR(p.buf, ibv.AccessLocalWrite)
	p.must(err)
	p.qp, err = id.CreateQP(p.pd, ibv.QPInit{SendCQ: p.cq, RecvCQ: p.cq,
		Cap: ibv.QPCap{MaxSendWR: 512, MaxRecvWR: rawReceives, MaxSendSGE: 1, MaxRecvSGE: 1,
			MaxInline: min(64<<10, id.Device().Attr().MaxInline)}})
	if err != nil {
		p.release()
		return p, err
	}
	for i := range rawReceives {
		p.receive(i)
	}
	var once sync.Once
	id.Notify(func(ibv.Event) {
		once.Do(func() { close(p.over) })
		p.cq.Interrupt()
	})
	t.Cleanup(p.Close)
	return p, nil
}

func (p *Raw) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

func (p *Raw) receive(i int) {
	b := p.buf[i*rawReceiveSize:][:rawReceiveSize]
	p.qp.PostRecv([]ibv.RecvWR{{ID: uint64(i), SGL: []ibv.SGE{{Buf: b, LKey: p.mr.LKey()}}}})
}

// received returns a message that has come, and posts its receive again.
func (p *Raw) received(wc *ibv.WC) []byte {
	i := int(wc.ID)
	b := bytes.Clone(p.buf[i*rawReceiveSize:][:wc.ByteLen])
	p.receive(i)
	return b
}

// Close drops the connection without a disconnect.
func (p *Raw) Close() {
	if p.qp == nil {
		return
	}
	p.qp.Close()
	p.qp = nil
	p.release()
}

// release gives back all but the queue pair.
func (p *Raw) release() {
	p.cq.Close()
	for _, mr := range append(p.regions, p.mr) {
		mr.Close()
	}
	p.pd.Close()
	p.ID.Close()
}

// Over is closed when the device has said that the connection is over.
func (p *Raw) Over() <-chan struct{} { return p.over }

// Send sends a message of these bytes. The connection may be over. b must not be changed
// afterwards.
func (p *Raw) Send(b []byte) {
	p.t.Helper()
	p.SendTogether(b)
}

// SendTogether sends messages by one post, so that they arrive together.
func (p *Raw) SendTogether(msgs ...[]byte) {
	p.t.Helper()
	p.Sent += len(msgs)
	p.post(msgs)
}

func (p *Raw) post(msgs [][]byte) {
	p.t.Helper()
	var wrs []ibv.SendWR
	for _, b := range msgs {
		wr := ibv.SendWR{Op: ibv.OpSend, Flags: ibv.SendSignaled | ibv.SendSolicited, SGL: []ibv.SGE{{Buf: b}}}
		if len(b) <= p.qp.Cap().MaxInline {
			wr.Flags |= ibv.SendInline
		} else {
			wr.SGL[0].LKey = p.region(b, 0).LKey()
		}
		wrs = append(wrs, wr)
	}
	p.qp.PostSend(wrs)
}

func (p *Raw) region(b []byte, access ibv.Access) ibv.MR {
	p.t.Helper()
	mr, err := p.pd.RegMR(b, access)
	p.must(err)
	p.regions = append(p.regions, mr)
	return mr
}

// Receive waits for the next message and returns nil at the end of the connection.
func (p *Raw) Receive() []byte {
	p.t.Helper()
	if len(p.early) > 0 {
		b := p.early[0]
		p.early = p.early[1:]
		return b
	}
	deadline := time.Now().Add(p.patience)
	var wc [1]ibv.WC
	for !p.flushed {
		p.must(p.cq.Arm(false))
		n, err := p.cq.Poll(wc[:])
		p.must(err)
		switch {
		case n == 0:
			if err := p.cq.Wait(deadline); err != nil && !errors.Is(err, ibv.ErrInterrupted) {
				p.t.Fatalf("neither a message nor the end: %v", err)
			}
		case wc[0].Status != ibv.WCSuccess:
			p.flushed = true
		case wc[0].Op == ibv.WCRecv:
			return p.received(&wc[0])
		}
	}
	return nil
}

// Poll returns messages that have come, without waiting for any.
func (p *Raw) Poll() (msgs [][]byte) {
	var wcs [8]ibv.WC
	n, _ := p.cq.Poll(wcs[:])
	for i := range wcs[:n] {
		switch {
		case wcs[i].Status != ibv.WCSuccess:
			p.flushed = true
		case wcs[i].Op == ibv.WCRecv:
			msgs = append(msgs, p.received(&wcs[i]))
		}
	}
	return msgs
}

// rdmaID is the work request of RDMA.
const rdmaID = 1 << 40

// RDMA moves b to the other end's memory by an RDMA Write, or fills b from there by an RDMA
// Read, and returns how that ended.
func (p *Raw) RDMA(op ibv.Opcode, b []byte, addr uint64, key uint32) ibv.WCStatus {
	p.t.Helper()
	mr := p.region(b, ibv.AccessLocalWrite)
	_, err := p.qp.PostSend([]ibv.SendWR{{ID: rdmaID, Op: op, Flags: ibv.SendSignaled,
		SGL: []ibv.SGE{{Buf: b, LKey: mr.LKey()}}, RemoteAddr: addr, RKey: key}})
	p.must(err)
	deadline := time.Now().Add(p.patience)
	var wc [1]ibv.WC
	for {
		p.must(p.cq.Arm(false))
		n, err := p.cq.Poll(wc[:])
		p.must(err)
		switch {
		case n == 0:
			if err := p.cq.Wait(deadline); err != nil && !errors.Is(err, ibv.ErrInterrupted) {
				p.t.Fatalf("no completion of the %v: %v", op, err)
			}
		case wc[0].ID == rdmaID:
			p.flushed = p.flushed || wc[0].Status != ibv.WCSuccess
			return wc[0].Status
		case wc[0].Status != ibv.WCSuccess:
			p.flushed = true
		case wc[0].Op == ibv.WCRecv:
			p.early = append(p.early, p.received(&wc[0]))
		}
	}
}

// Register registers memory that the other end may read and write.
func (p *Raw) Register(b []byte) (addr uint64, key uint32) {
	p.t.Helper()
	mr := p.region(b, ibv.AccessLocalWrite|ibv.AccessRemoteWrite|ibv.AccessRemoteRead)
	return mr.Addr(), mr.RKey()
}

// WaitEnd waits for the end of the connection.
func (p *Raw) WaitEnd() {
	p.t.Helper()
	for p.Receive() != nil {
	}
	select {
	case <-p.over:
	case <-time.After(p.patience):
		p.t.Fatal("the connection goes on")
	}
}

// ReceiveData waits for the next Data Transfer message and takes the credits in it; ok is
// false at the end of the connection.
func (p *Raw) ReceiveData() (h DataTransfer, payload []byte, ok bool) {
	p.t.Helper()
	h, payload, _, ok = p.receiveData()
	return h, payload, ok
}

func (p *Raw) receiveData() (h DataTransfer, payload, message []byte, ok bool) {
	p.t.Helper()
	if message = p.Receive(); message == nil {
		return h, nil, nil, false
	}
	h, payload, err := ParseDataTransfer(message)
	p.must(err)
	p.Credits += int(h.CreditsGranted)
	p.Received++
	return h, payload, message, true
}

// ReceiveTransfer waits for the next message with a transfer header; ok is false at the end of
// the connection.
func (p *Raw) ReceiveTransfer() (t Transfer, payload []byte, ok bool) {
	p.t.Helper()
	for {
		h, payload, message, ok := p.receiveData()
		if !ok {
			return t, nil, false
		}
		if h.Flags&FlagTransfer != 0 {
			t, err := ParseTransfer(message)
			p.must(err)
			return t, payload, true
		}
	}
}

// ExpectTransfer is ReceiveTransfer for a message of this kind, without which the test fails.
func (p *Raw) ExpectTransfer(kind TransferKind) Transfer {
	p.t.Helper()
	t, _, ok := p.ReceiveTransfer()
	if !ok {
		p.t.Fatal("the connection has ended")
	}
	if t.Kind != kind {
		p.t.Fatalf("kind %d was to come and not %+v", kind, t)
	}
	return t
}

// ExpectFIN waits for the end of the other end's stream.
func (p *Raw) ExpectFIN() {
	p.t.Helper()
	for {
		h, _, ok := p.ReceiveData()
		if !ok {
			p.t.Fatal("the connection has ended")
		}
		if h.Flags&FlagFIN != 0 {
			return
		}
	}
}

// Negotiate sends a Negotiate Request, waits for the response, and takes the credits in it.
func (p *Raw) Negotiate(m NegotiateRequest) NegotiateResponse {
	p.t.Helper()
	p.post([][]byte{m.Append(nil)})
	resp, err := ParseNegotiateResponse(p.Receive())
	p.must(err)
	p.Credits = int(resp.CreditsGranted)
	return resp
}

// Respond waits for a Negotiate Request, which it returns, and sends a Negotiate Response.
func (p *Raw) Respond(m NegotiateResponse) NegotiateRequest {
	p.t.Helper()
	b := p.Receive()
	request, err := ParseNegotiateRequest(b)
	p.must(err)
	if len(b) != NegotiateRequestLen {
		p.t.Fatalf("a Negotiate Request of %d bytes", len(b))
	}
	p.post([][]byte{m.Append(nil)})
	return request
}

// WaitCredit receives until there is a credit.
func (p *Raw) WaitCredit() {
	p.t.Helper()
	for p.Credits < 1 {
		if _, _, ok := p.ReceiveData(); !ok {
			p.t.Fatal("the connection has ended")
		}
	}
}

// SendData waits for a credit and sends a message.
func (p *Raw) SendData(b []byte) {
	p.t.Helper()
	p.WaitCredit()
	p.Credits--
	p.Send(b)
}

// SendTransfer is SendData of a message with a transfer header and without payload.
func (p *Raw) SendTransfer(t Transfer) {
	p.t.Helper()
	p.SendData(t.Message(nil))
}

// Payload sends a message with n bytes of payload, for which it takes a credit at once.
func (p *Raw) Payload(n int) {
	p.t.Helper()
	p.Credits--
	p.Send(Segment(n, 0))
}

// Grant sends a message that does nothing but grant credits, for which it takes a credit at
// once.
func (p *Raw) Grant(n uint16) {
	p.t.Helper()
	p.Credits--
	p.Send(DataTransfer{CreditsRequested: 16, CreditsGranted: n}.Message(HeaderLen))
}

// RequestResponse sends a message that asks for one and grants n credits.
func (p *Raw) RequestResponse(n int) {
	p.t.Helper()
	p.SendData(DataTransfer{CreditsRequested: 16, CreditsGranted: uint16(n), Flags: FlagResponseRequested}.Message(HeaderLen))
}

// Segment is a message with n bytes of payload, which are those of DataTransfer.Message. It
// announces rest more, asks for 16 credits and grants one.
func Segment(n, rest int) []byte {
	return DataTransfer{CreditsRequested: 16, CreditsGranted: 1,
		DataOffset: PayloadOffset, DataLength: uint32(n), RemainingDataLength: uint32(rest)}.Message(PayloadOffset + n)
}

// EmptySegment is a message without payload that has these flags, asks for 16 credits and
// grants some.
func EmptySegment(flags uint16, granted int) []byte {
	return DataTransfer{CreditsRequested: 16, CreditsGranted: uint16(granted), Flags: flags}.Message(HeaderLen)
}

// Begin begins transfer id of n bytes to the other end: by an offer where data is read, of the
// peer's memory that addr and key say, and else by a request.
func (p *Raw) Begin(reads bool, id uint32, n int, addr uint64, key uint32) {
	p.t.Helper()
	if reads {
		p.SendTransfer(Transfer{Kind: Offer, ID: id, Addr: addr, Key: key, Length: uint32(n)})
	} else {
		p.SendTransfer(Transfer{Kind: Request, ID: id, Length: uint32(n)})
	}
}

// BeginFirst begins transfer 1 of n bytes of memory, which it returns.
func (p *Raw) BeginFirst(reads bool, n int) []byte {
	p.t.Helper()
	b := make([]byte, n)
	addr, key := p.Register(b)
	p.Begin(reads, 1, n, addr, key)
	return b
}

// WithdrawTransfer asks for a transfer back where data is read, and else says that it ends
// here.
func (p *Raw) WithdrawTransfer(reads bool, id uint32, flags uint8) {
	p.t.Helper()
	p.SendTransfer(Withdrawal(reads, id, flags))
}

// Withdrawal is what WithdrawTransfer sends.
func Withdrawal(reads bool, id uint32, flags uint8) Transfer {
	if reads {
		return Transfer{Kind: Withdraw, Flags: flags, ID: id}
	}
	return Transfer{Kind: Written, Flags: flags | TransferEnd, ID: id}
}

// ExpectBegin waits for the beginning of a transfer from the other end.
func (p *Raw) ExpectBegin(reads bool) Transfer {
	p.t.Helper()
	if reads {
		return p.ExpectTransfer(Offer)
	}
	return p.ExpectTransfer(Request)
}

// Answer writes b to the memory of a grant, which is as long, and says so.
func (p *Raw) Answer(grant Transfer, b []byte) {
	p.t.Helper()
	if status := p.RDMA(ibv.OpWrite, b, grant.Addr, grant.Key); status != ibv.WCSuccess {
		p.t.Fatalf("the RDMA Write for %+v: %v", grant, status)
	}
	p.SendTransfer(Transfer{Kind: Written, ID: grant.ID, Length: grant.Length})
}

// Take moves all of a transfer that the other end has begun, and returns its bytes.
func (p *Raw) Take(reads bool, begun Transfer) []byte {
	p.t.Helper()
	b := make([]byte, begun.Length)
	if !reads {
		addr, key := p.Register(b)
		p.SendTransfer(Transfer{Kind: Grant, ID: begun.ID, Addr: addr, Key: key, Length: begun.Length})
		p.ExpectTransfer(Written)
		return b
	}
	if status := p.RDMA(ibv.OpRead, b, begun.Addr, begun.Key); status != ibv.WCSuccess {
		p.t.Fatalf("the RDMA Read for %+v: %v", begun, status)
	}
	p.SendTransfer(Transfer{Kind: Done, ID: begun.ID, Length: begun.Length})
	return b
}
