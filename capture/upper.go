package capture

type Protocol uint8
type UpperMessage struct{}

func (u *UpperMessage) clone() UpperMessage { return *u }

type upper interface {
	flush()
	forget()
	gap(Side)
}

func (r *Reassembler) toUpper(m *Message) {}
